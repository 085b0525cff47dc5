"""The correctness gate is green for right optimizers and red for wrong ones, and a red one stops the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from benchmarks import gate, step
from benchmarks.optimizers import ADAMW, OPTIMIZERS, SGD, CaptureFailed, Entry

OURS = [name for name, entry in OPTIMIZERS.items() if entry.ours and entry.mode != "graph"]


@dataclass(frozen=True)
class Other(Entry):
    """An entry whose optimizer comes from a function; arguments for our formats are dropped."""

    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def build(self, params: Sequence[torch.nn.Parameter], **overrides: Any) -> torch.optim.Optimizer:
        ours = ("quantize", "master_weight_bits")
        return self.make(params, **{**self.hyper, **{k: v for k, v in overrides.items() if k not in ours}})


def adamw(make: Callable[..., torch.optim.Optimizer], mode: str = "step") -> Entry:
    return Other("flashdist:Other", "adamw", torch.float32, 28.0, ADAMW, mode=mode, make=make)


def without_decay(params: Any, **hyper: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{**hyper, "weight_decay": 0.0})


def with_l2_decay(params: Any, **hyper: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, **hyper)


class WithoutBiasCorrection(torch.optim.AdamW):
    def step(self) -> None:  # type: ignore[override]
        for state in self.state.values():
            state["step"] += 1000
        super().step()


class LastElementStays(torch.optim.AdamW):
    def step(self) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        before = [p.detach().flatten()[-1].clone() for p in params]
        super().step()
        for p, old in zip(params, before, strict=True):
            p.data.view(-1)[-1] = old


class Explodes(torch.optim.AdamW):
    def step(self) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["params"][1].data.fill_(float("nan"))


class Refuses(torch.optim.AdamW):
    def step(self) -> None:  # type: ignore[override]
        raise RuntimeError("no such kernel")


class LosesTheMaster(torch.optim.AdamW):
    def master_weight(self, p: torch.Tensor) -> torch.Tensor:
        return p.detach() * 1.02


@pytest.mark.parametrize("name", OURS)
def test_ours_are_green(name: str) -> None:
    result = gate.run_gate(name, OPTIMIZERS[name], "cpu")
    assert result.status == "green", result.line()


def test_torch_is_green_next_to_the_reference() -> None:
    assert gate.run_gate("adamw", adamw(torch.optim.AdamW), "cpu").status == "green"
    sgd = Other("flashdist:Other", "sgd", torch.float32, 20.0, SGD, make=torch.optim.SGD)
    assert gate.run_gate("sgd", sgd, "cpu").status == "green"


@pytest.mark.parametrize(
    "wrong",
    [without_decay, with_l2_decay, WithoutBiasCorrection, LastElementStays, Explodes, Refuses, LosesTheMaster],
)
def test_a_wrong_optimizer_is_red(wrong: Callable[..., torch.optim.Optimizer]) -> None:
    assert gate.run_gate("wrong", adamw(wrong), "cpu").status == "red"


def test_a_wrong_optimizer_is_red_by_the_tolerance_for_defaults_alone() -> None:
    for wrong in (without_decay, with_l2_decay, WithoutBiasCorrection, LastElementStays):
        assert gate.largest_error(adamw(wrong), "cpu", {}) > 2 * gate.DEFAULT_TOLERANCE["adamw"]


def test_a_graph_that_cannot_be_captured_is_a_reason_and_no_error() -> None:
    def uncapturable(*_: Any, **__: Any) -> torch.optim.Optimizer:
        raise CaptureFailed("the step synchronises")

    result = gate.run_gate("graph", adamw(uncapturable), "cpu")
    assert result.status == "unavailable"
    assert "the step synchronises" in result.line()


def test_a_red_gate_prints_the_figures_and_no_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    red = gate.run_gate("flashdist_adamw", adamw(without_decay), "cpu")
    started = []

    def run_worker(name: str, *_: Any) -> tuple[list[dict[str, Any]], None]:
        started.append(name)
        return [{"kind": "gate", **red.as_dict()}], None

    monkeypatch.setattr(step, "run_worker", run_worker)
    code = step.main(["--device", "cpu", "--optimizers", "flashdist_adamw,torch_fused_fp32"])
    output = capsys.readouterr().out
    assert code == 1
    assert started == ["gate"]
    assert f"{red.exact_error:.1e}" in output
    assert " ms" not in output


def test_a_graph_that_cannot_be_captured_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    green = gate.GateResult("flashdist_adamw", "green", 1e-6, default_error=1e-3, default_tolerance=1e-2)
    without = gate.GateResult("flashdist_adamw_graph", "unavailable", reason="no device")
    answer = [{"kind": "gate", **result.as_dict()} for result in (green, without)]
    monkeypatch.setattr(step, "run_worker", lambda *_: (answer, None))
    results = step.pass_gate(["flashdist_adamw", "flashdist_adamw_graph"], step.parser().parse_args([]))
    assert results == [green.as_dict(), without.as_dict()]


def test_an_optimizer_that_the_gate_did_not_reach_counts_as_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "run_worker", lambda *_: ([], "exit code -11"))
    with pytest.raises(step.GateRed, match="flashdist_lion: not checked, exit code -11"):
        step.pass_gate(["flashdist_lion"], step.parser().parse_args([]))
