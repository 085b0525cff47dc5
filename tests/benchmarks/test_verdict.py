"""The verdict reads the right cells, and says what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, verdict
from benchmarks.plot import relative_times
from benchmarks.sets import numel

COPY = 4.2e12


def row(set_name: str, optimizer: str, device_ms: float, wall_ms: float = 0.2) -> dict[str, Any]:
    cells = dict.fromkeys(report.ROW, 0) | {"set": set_name, "optimizer": optimizer, "numel": numel(set_name)}
    return report.finish_row(cells | {"device_ms": device_ms, "event_ms": device_ms, "wall_ms": wall_ms}, COPY)


def good() -> dict[str, Any]:
    rows = []
    for s, ours, one_moment, theirs in (("flat1b", 3.4, 2.8, 8.7), ("llama1.4b", 4.5, 3.7, 11.3)):
        rows += [row(s, "flashdist_adamw", ours)]
        rows += [row(s, f"flashdist_{rule}", one_moment) for rule in ("lion", "sgd")]
        rows += [row(s, peer, theirs) for peer in ("torch_fused_fp32", "flashoptim")]
    rows += [row("llama1.4b", "flashdist_adamw_clip", 5.4)]
    rows += [row("gpt2_124m", "flashdist_adamw", 0.48), row("gpt2_124m", "torch_fused_fp32", 1.0)]
    rows += [row("gpt2_124m", "flashoptim", 5.7)]
    rows += [row("resnet50", "flashdist_adamw", 0.12), row("tiny2000", "flashdist_adamw", 0.3)]
    top = dict.fromkeys(report.TOP_LEVEL, "x")
    return top | {"copy_bytes_per_s": COPY, "rows": rows, "skipped": [], "gate": []}


def unreached(result: dict[str, Any]) -> list[str]:
    return [t.text for t, figure in verdict.judge(result) if figure is None or not t.reached(figure)]


def test_a_good_result_reaches_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unreached(good()) == []
    report.write(good(), tmp_path / "good.json")
    assert verdict.main([str(tmp_path / "good.json")]) == 0
    assert capsys.readouterr().out.count(" reached") == len(verdict.TARGETS) == 18


@pytest.mark.parametrize(
    ("set_name", "optimizer", "device_ms", "wall_ms", "lost"),
    [
        ("flat1b", "flashdist_lion", 2.9, 0.2, ["flat1b: flashdist_lion, share of copy bandwidth"]),
        ("resnet50", "flashdist_adamw", 0.14, 0.2, ["resnet50: flashdist_adamw, device_ms"]),
        ("tiny2000", "flashdist_adamw", 0.3, 1.6, ["tiny2000: flashdist_adamw, wall_ms"]),
        ("gpt2_124m", "flashoptim", 4.7, 0.2, ["gpt2_124m: flashdist_adamw, times faster than flashoptim"]),
    ],
)
def test_a_slow_row_loses_its_target(
    set_name: str, optimizer: str, device_ms: float, wall_ms: float, lost: list[str]
) -> None:
    result = good()
    result["rows"] = [r for r in result["rows"] if (r["set"], r["optimizer"]) != (set_name, optimizer)]
    result["rows"].append(row(set_name, optimizer, device_ms, wall_ms))
    assert unreached(result) == lost


def test_clip_is_measured_against_its_floor() -> None:
    floor_ms = 14.4 * numel("llama1.4b") / (0.9 * COPY) * 1e3
    result = good()
    result["rows"].append(row("llama1.4b", "flashdist_adamw_clip", 1.16 * floor_ms))
    assert unreached(result) == ["llama1.4b: clip + step, device time over 14.4 B/param at 0.90 of copy"]


def test_what_was_not_measured_is_not_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = good() | {"rows": [], "copy_bytes_per_s": None}
    report.write(result, tmp_path / "empty.json")
    assert verdict.main([str(tmp_path / "empty.json")]) == 1
    assert capsys.readouterr().out.count("not measured") == len(verdict.TARGETS)


def test_plot_falls_back_to_milliseconds_without_the_baseline() -> None:
    values, label = relative_times(good())
    assert label == "ms a step"  # resnet50 has no row of torch's fused AdamW here
    both = good()
    both["rows"] = [r for r in both["rows"] if r["set"] == "flat1b"]
    values, label = relative_times(both)
    assert label.startswith("time / torch")
    assert values["flat1b", "torch_fused_fp32"] == 1.0
