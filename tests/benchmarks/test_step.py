"""The step benchmark from the command line to its files, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import measure, report, step, worker
from benchmarks.optimizers import OPTIMIZERS, Entry, GraphStep
from benchmarks.sets import SETS


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_command_writes_a_result_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    arguments = [
        "--device",
        "cpu",
        "--sets",
        "smoke",
        "--optimizers",
        "torch_fused_fp32",
        "--iters",
        "3",
        "--threads",
        "1",
    ]
    assert step.main([*arguments, "--out", str(out), "--commit", "abc"]) == 0
    assert "torch_fused_fp32" in capsys.readouterr().out
    assert out.with_suffix(".png").stat().st_size > 5_000
    result = report.read(out)
    assert result["commit"] == "abc"
    assert result["device"].endswith(", 1 threads")
    (row,) = result["rows"]
    assert tuple(row) == report.ROW
    assert (row["set"], row["optimizer"]) == ("smoke", "torch_fused_fp32")
    assert row["device_ms"] is row["event_ms"] is row["fraction_of_copy"] is None
    assert row["wall_ms"] > 0
    assert row["peak_bytes"] > row["temporary_bytes"] >= 0


def test_worker_measures_what_torch_holds(tmp_path: Path) -> None:
    worker.run("torch_fused_fp32", ["torch_fused_fp32"], ["smoke"], "cpu", 3, tmp_path / "out")
    host, row = records(tmp_path / "out")
    assert host["kind"] == "host"
    assert host["torch"] == torch.__version__
    assert row["bytes_per_param"] == pytest.approx(8.0, rel=0.01)  # two fp32 moments and a step count a tensor


@pytest.mark.parametrize(
    "name", ["flashdist_adamw", "flashdist_lion", "flashdist_sgd", "flashdist_adamw_clip", "flashdist_adamw_compiled"]
)
def test_worker_measures_ours(name: str, tmp_path: Path) -> None:
    worker.run(name, [name], ["smoke"], "cpu", 3, tmp_path / "out")
    _, row = records(tmp_path / "out")
    assert (row["kind"], row["optimizer"]) == ("row", name)
    bytes_per_param = 3.1875 if "adamw" in name else 2.0625
    # More than the formats' own: partial groups, and vectors with fp32 moments.
    assert bytes_per_param < row["bytes_per_param"] < bytes_per_param + 0.6


def test_a_set_that_fails_is_left_out_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETS, "broken", lambda: [(-1,)])
    worker.measure_sets("torch_fused_fp32", ["broken", "smoke"], "cpu", 3, tmp_path / "out")
    skip, row = records(tmp_path / "out")
    assert (skip["kind"], skip["set"]) == ("skip", "broken")
    assert "RuntimeError" in skip["reason"]
    assert (row["kind"], row["set"]) == ("row", "smoke")


def test_a_worker_ends_at_its_time_limit(capsys: pytest.CaptureFixture[str]) -> None:
    args = step.parser().parse_args(["--device", "cpu"])
    assert step.run_worker("torch_fused_fp32", ["torch_fused_fp32"], ["smoke"], args, 0.05) == (
        [],
        "more than 0 s",
    )
    assert "torch_fused_fp32: more than 0 s" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "bnb8", Entry("no_such_package.optim:AdamW8bit", "adamw", torch.bfloat16, 10.0))
    assert step.main(["--device", "cpu", "--optimizers", "bnb8"]) == 1
    assert "bnb8: skipped, the package no_such_package is not installed" in capsys.readouterr().out


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SystemExit, match="unknown name 'gpt5'"):
        step.main(["--sets", "gpt5"])


def test_share_of_the_copy_bandwidth() -> None:
    row = dict.fromkeys(report.ROW, 0) | {"optimizer": "torch_fused_fp32", "device_ms": 7.0, "numel": 2**30}
    finished = report.finish_row(row, copy_bytes_per_s=8.0e12)
    assert finished["fraction_of_copy"] == pytest.approx(28 * 2**30 / 7e-3 / 8e12)


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"rows": [{}]}')
    with pytest.raises(ValueError, match="lacks date"):
        report.read(path)


def test_temporary_memory_is_the_peak_and_not_the_sum() -> None:
    def one_step() -> None:
        for _ in range(3):
            torch.ones(1000, 256)  # 1 MB, freed before the next

    assert 1_024_000 <= measure.temporary_bytes_cpu(one_step) < 1_100_000


def test_bytes_moved_are_those_of_the_formats() -> None:
    moments, scales = 2, 2 / 32 + 4 / 32
    held = 2 + 1 + moments + scales
    assert OPTIMIZERS["flashdist_adamw"].bytes_moved == 2 * held + 2
    assert OPTIMIZERS["flashdist_lion"].bytes_moved == 2 * (2 + 1 + 1 + 2 / 32) + 2
    assert OPTIMIZERS["flashdist_adamw_clip"].bytes_moved == 2 * held + 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures with CUDA events and graphs")
@pytest.mark.parametrize("name", ["flashdist_adamw", "flashdist_adamw_clip", "flashdist_adamw_graph"])
def test_device_time_on_a_gpu(name: str) -> None:
    row = measure.measure(OPTIMIZERS[name], SETS["smoke"](), "cuda", 10)
    assert row["device_queue_full"]
    assert 0 < row["device_ms"] <= row["wall_ms"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the message where there is no CUDA device")
def test_a_graph_without_a_gpu_says_so() -> None:
    with pytest.raises(RuntimeError, match="CUDA graphs need a CUDA device"):
        GraphStep(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
