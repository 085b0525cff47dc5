"""The demo's parts on a model small enough for a test; that its losses agree is measured by running it."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import demo
import pytest
import torch
from demo_report import KINDS, Run, relative_difference, smooth, table
from rich.console import Console
from rich.progress import Progress

TINY = dataclasses.replace(demo.CONFIG, context=8, layers=1, heads=2, width=64)


@pytest.fixture
def tiny_demo(monkeypatch):
    """Makes the demo's model and validation tiny, and gives back the threads that it leaves to others."""
    monkeypatch.setattr(demo, "CONFIG", TINY)
    monkeypatch.setattr(demo, "VALIDATION_BATCHES", 2)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def corpus():
    text = bytes(range(97, 123)) * 40
    return demo.load_corpus({f"document {i}": text for i in range(40)})


def silent() -> Progress:
    return Progress(console=Console(file=io.StringIO()))


def test_both_runs_start_from_the_same_weights(tiny_demo):
    reference = demo.build(flash=False, seed=3).model.state_dict()
    flash = demo.build(flash=True, seed=3).model.state_dict()
    assert reference.keys() == flash.keys()
    for name in reference:
        assert reference[name].dtype == torch.float32
        assert torch.equal(reference[name].bfloat16(), flash[name])


def test_the_table_shows_what_the_formats_promise(tiny_demo, corpus):
    with silent() as progress:
        runs = demo.train_both(corpus, 3, 0, progress)
    reference, flash = (run.bytes_per_parameter for run in runs)
    assert [reference[kind] for kind in ("weights", "moments", "gradients")] == [4, 8, 4]
    assert reference["corrections"] == reference["scales"] == 0
    assert flash["weights"] == flash["gradients"] == 2
    # 1-D parameters, a larger share here than in a real model, keep fp32 moments and a two-byte correction.
    assert flash["corrections"] == pytest.approx(1, abs=0.01)
    assert flash["moments"] == pytest.approx(2, abs=0.05)
    assert flash["derived"] < 0.1
    assert flash["scales"] == pytest.approx(0.1875, abs=0.002)
    assert sum(flash.values()) < sum(reference.values()) / 2


def test_both_runs_learn(tiny_demo, corpus):
    with silent() as progress:
        runs = demo.train_both(corpus, 40, 0, progress)
    for run in runs:
        assert len(run.losses) == 40
        assert run.losses[-1] < 0.9 * run.losses[0]
        assert run.validation_loss < run.losses[0]


def test_the_same_seed_gives_the_same_losses_though_the_runs_share_a_process(tiny_demo, corpus):
    with silent() as progress:
        first = demo.train_both(corpus, 5, 7, progress)
        again = demo.train_both(corpus, 5, 7, progress)
        other = demo.train_both(corpus, 5, 8, progress)
    for a, b, c in zip(first, again, other, strict=True):
        assert a.losses == b.losses
        assert a.losses != c.losses


@pytest.mark.parametrize("steps", [1, 2, 10, 300])
def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_tenth(steps):
    rates = [demo.learning_rate(step, steps) for step in range(steps)]
    assert max(rates) == demo.LEARNING_RATE
    assert all(0 < rate <= demo.LEARNING_RATE for rate in rates)
    if steps == 300:
        assert rates[-1] == pytest.approx(0.1 * demo.LEARNING_RATE, rel=0.01)


def test_main_writes_the_picture_and_the_figures(tiny_demo, corpus, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "load_corpus", lambda: corpus)
    picture, figures = tmp_path / "new" / "picture", tmp_path / "figures.json"
    monkeypatch.setattr("sys.argv", ["demo.py", "--steps", "2", "--out", str(picture), "--json", str(figures)])
    demo.main()
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = json.loads(figures.read_text())
    assert written["steps"] == 2
    assert [len(run["losses"]) for run in written["runs"]] == [2, 2]
    first, second = (run["validation_loss"] for run in written["runs"])
    assert written["relative_difference"] == pytest.approx(second / first - 1)
    assert "total" in capsys.readouterr().out


def test_the_table_names_every_kind_and_the_difference():
    fp32 = dict.fromkeys(KINDS, 0.0) | {"weights": 4.0, "moments": 8.0, "gradients": 4.0}
    small = dict.fromkeys(KINDS, 1.0)
    runs = [Run("a", [1.0], 2.0, fp32, 1.0, 5.0), Run("b", [1.0], 2.01, small, 1.0, 5.0)]
    assert relative_difference(*runs) == pytest.approx(0.005)
    output = io.StringIO()
    Console(file=output, width=100).print(table(*runs))
    assert all(kind in output.getvalue() for kind in (*KINDS, "16.000", "7.000 (44%)", "+0.50%"))


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant():
    assert smooth([3.0, 1.0])[0] == 3.0
    assert all(math.isclose(value, 2.0) for value in smooth([2.0] * 50))
