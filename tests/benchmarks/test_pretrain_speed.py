from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import pretrain_speed


def test_both_arms_are_run_on_the_same_batches_and_written_down(tmp_path, capsys):
    out = tmp_path / "speed.json"
    pretrain_speed.main(["--device", "cpu", "--smoke", "--log-every", "1", "--out", str(out)])
    record = json.loads(out.read_text())
    flash, torch_arm = record["arms"]["flash"], record["arms"]["torch"]
    assert len(flash["losses"]) == len(torch_arm["losses"]) == 4
    assert flash["losses"] == pytest.approx(torch_arm["losses"], rel=2e-3)  # the rate warms up over 20 steps
    assert len(set(flash["losses"])) == 4
    assert record["speed_ratio"] == pytest.approx(flash["tokens_per_second"] / torch_arm["tokens_per_second"])
    assert "no BPE" in record["text"]


def test_the_text_is_the_same_every_time_and_has_many_words():
    tokens = pretrain_speed.read_tokens(0.3, 4096)
    assert np.array_equal(tokens, pretrain_speed.read_tokens(0.3, 4096))
    assert len(np.unique(tokens)) > 1000
    assert tokens.max() < 4096
