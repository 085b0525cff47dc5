"""The comparison of finetuning runs, on a tiny model; and the questions it is meant for."""

from __future__ import annotations

import pytest
import python_questions

from benchmarks.finetune_quality import main, summarize
from tests.support import finetuning


def test_arms_are_compared(tmp_path):
    model = finetuning.folder(tmp_path / "model")
    data = finetuning.jsonl(tmp_path / "chat.jsonl", finetuning.questions(60))
    out = tmp_path / "r.json"
    settings = ["data.sequence=64", "train.steps=2", "train.batch=2", "train.device=cpu", "optimizer.lr=0.003"]
    common = ["--model", str(model), "--data", str(data), "--out", str(out), "--commit", "x", "--seeds", "1"]
    result = main([*common, "--arms", "torch_adamw,flash_release", *settings])
    assert out.exists()
    exact, ours = result["rows"]
    assert exact["relative"] == 0
    assert ours["final"][0] < ours["first"][0]
    assert ours["relative"] == pytest.approx(0, abs=0.05)


def test_the_verdict():
    good = {"torch_adamw": [{0: 3.0, 9: 2.0}, {0: 3.0, 9: 2.2}], "flash_adamw": [{0: 3.0, 9: 2.01}, {0: 3.0, 9: 2.2}]}
    assert summarize(good)["rows"][1]["relative"] == pytest.approx(0.01 / 4.2, abs=1e-5)
    assert summarize(good)["within_0.5_percent"]
    bad = {**good, "flash_adamw": [{9: 2.05}, {9: 2.2}]}
    assert not summarize(bad)["within_0.5_percent"]


def test_questions_from_a_module():
    source = b'''
def f(a, b=1):
    """Add two numbers, of which the second one is 1 by default.

    More.
    """
class C:
    """Short."""
    def g(self): "Give back what was put in, as often as it is asked for."
def _hidden(): "This is not for anybody to see, however long it may become."
'''
    found = list(python_questions._of_module("p/__init__.py", source))
    assert [answer for _, answer in found] == [
        "Add two numbers, of which the second one is 1 by default.",
        "Give back what was put in, as often as it is asked for.",
    ]
    assert found[0][0] == "What does the function p.f(a, b=1) of Python's standard library do?"
