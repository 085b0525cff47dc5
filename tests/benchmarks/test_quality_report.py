"""Paired differences, the bounds in words, and the report's sections."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.quality import dither, horizon, report, results
from benchmarks.quality.anchors import SchemeAdamW, s1
from benchmarks.quality.images import OPTIMIZERS, accuracy
from benchmarks.quality.pairs import difference, differences, verdict
from benchmarks.quality.schemes import SCHEMES


def run(arm: str, seed: int, loss: float | None, start: str = "a", beta2: float = 0.95) -> dict[str, Any]:
    return {"arm": arm, "beta2": beta2, "seed": seed, "start": start, "final_val_loss": loss, "late_train_loss": loss}


RUNS = [
    *(run("adamw", seed, 3.0 + seed) for seed in range(3)),
    *(run("flashadamw", seed, 3.0 + seed + gap) for seed, gap in enumerate((0.001, 0.002, 0.003))),
    *(run("flashoptim", seed, 3.0 + seed - 0.01) for seed in range(2)),
    run("bf16", 0, None),
    run("lion", 0, 3.3), run("flashlion", 0, 3.4),
    run("flashadamw", 0, 9.0, start="b"), run("flashadamw", 7, 9.0), run("flashadamw", 0, 9.0, beta2=0.999),
]  # fmt: skip


def test_a_pair_has_one_start_one_beta2_and_one_seed():
    d = difference(RUNS, "flashadamw", 0.95)
    assert d.values == pytest.approx((0.001, 0.002, 0.003))
    assert d.mean == pytest.approx(0.002)
    assert d.error == pytest.approx(0.001 / math.sqrt(3))


def test_every_arm_is_compared_with_its_own_reference():
    found = {d.arm: d for d in differences(RUNS)}
    assert set(found) == {"flashadamw", "flashoptim", "bf16", "flashlion"}
    assert found["flashlion"].values == pytest.approx((0.1,))
    assert found["flashlion"].error is None
    assert (found["bf16"].values, found["bf16"].lost) == ((), 1)


@pytest.mark.parametrize(("limit", "reached"), [(0.0021, True), (0.001, False)])
def test_the_verdict_says_what_was_reached(limit, reached):
    """The mean of 0.002 is 3.5 standard errors from 0, so that the limit alone decides."""
    first, second = verdict(RUNS, 0.95, limit)
    assert first.endswith("**reached**") == reached
    assert "+0.00200 (standard error 0.00058)" in first
    assert second.endswith("no further from AdamW: **reached**")
    assert verdict(RUNS, 0.5) == ["beta2 0.5: not measured"]


def test_a_section_is_replaced_in_its_place():
    document = report.put("# Title\n", "one", "<!-- one -->\nold\n<!-- end one -->")
    document = report.put(document, "two", "<!-- two -->\nx\n<!-- end two -->")
    document = report.put(document, "one", "<!-- one -->\nnew\n<!-- end one -->")
    assert document == "# Title\n\n<!-- one -->\nnew\n<!-- end one -->\n\n<!-- two -->\nx\n<!-- end two -->\n"


@pytest.mark.parametrize("path", sorted(results.FOLDER.glob("quality-*.json")), ids=lambda path: path.stem)
def test_kept_results_can_be_reported(path, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.quality.plot.plot", lambda result, target: tmp_path / target.name)
    text = report.section(path)
    assert text.count("|---|") >= 1
    assert path.name in text


def test_the_dither_moves_what_nearest_rounding_holds(monkeypatch):
    monkeypatch.setattr(dither, "GROUPS", 4)
    gradient = dither.situations(80)["beside a steady one, falling 0.3 to 0.03"]
    found = dither.compare(gradient, 0.95, 320)
    assert found["flashdist_nearest"]["root_ratio"] > 2
    assert abs(found["flashdist"]["root_ratio"] - 1) < 0.2
    stopped = dither.stopped(0.95, 300)
    assert stopped["flashdist"] == 0.0
    assert stopped["flashdist_nearest"] > 0.1


def test_the_anchors_tell_schemes_apart():
    found = {
        name: s1(lambda p, b, e, n=name: SchemeAdamW(p, b, e, SCHEMES[n]), torch.float32, 0.999, "cpu")
        for name in ("exact", "flashdist", "flashoptim")
    }
    assert found["exact"] == pytest.approx(1.0, abs=0.01)
    assert found["flashdist"] < 3
    assert found["flashoptim"] > 1000


def test_our_split_is_within_its_bound_and_lost_updates_are_seen(monkeypatch):
    ours, theirs = horizon.split_error()
    assert ours["largest, ULP"] <= 1 / 512
    assert theirs["largest, ULP"] > 1 / 512
    monkeypatch.setattr(horizon, "ELEMENTS", 8)
    rows = {(round(r["weight"], 4), r["lr"]): r for r in horizon.drift(200)}
    assert rows[1.3, 1e-8]["of the way gone"] == pytest.approx(1.0, abs=0.2)  # every update is lost
    assert rows[0.0013, 1e-5]["of the way gone"] < 0.05


def test_a_network_learns_to_tell_images_apart(monkeypatch):
    monkeypatch.setattr("benchmarks.quality.images.HELD_OUT", 100)
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (700,), generator=generator)
    x = torch.randn(10, 1, 8, 8, generator=generator)[y] + 0.1 * torch.randn(700, 1, 8, 8, generator=generator)
    assert accuracy(OPTIMIZERS["SGD with momentum", "flashdist"], True, 0, 4, x, y) > 60
