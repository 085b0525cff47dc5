"""The commands of docs/convert.md and docs/moving_over.md run as they stand there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import flashdist
from flashdist import FlashAdamW, checkpoint
from tests.checkpoint.test_contents import train
from tests.convert.test_to_flashdist import flashoptim_file

DOCS = Path(__file__).parent.parent.parent / "docs"


def commands(page):
    blocks = re.findall(r"^```bash\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [shlex.split(line, comments=True)[1:] for block in blocks for line in block.splitlines() if line.strip()]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """What the pages take for granted, in the current folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Linear(64, 32)
    reference = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train(model, reference, 2)
    saved = {"model": model.state_dict(), "optimizer": reference.state_dict()}
    torch.save(saved, "adamw.pt")
    states = {
        i: {"step": 2, "state1": s["exp_avg"], "state2": s["exp_avg_sq"]}
        for i, s in saved["optimizer"]["state"].items()
    }
    torch.save({**saved, "optimizer": {**saved["optimizer"], "state": states}}, "bnb.pt")
    flashoptim_file("flashoptim.pt", True, 24)
    model.zero_grad()
    model = flashdist.cast_model(model)
    opt = FlashAdamW(model.parameters(), lr=2e-3)
    train(model, opt, 1)
    checkpoint.save("run/step-1000", model, opt)
    Path("my-model").mkdir()
    (Path("my-model") / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


@pytest.mark.parametrize("page", ["convert.md", "moving_over.md"])
def test_commands_of_a_page(files, command, page):
    if page == "convert.md":  # there a command makes it
        Path("adamw.pt").unlink()
    ran = 0
    for arguments in commands(page):
        assert arguments[0] == "convert"
        if "deepspeed" in arguments:  # tests/convert/test_from_deepspeed.py
            continue
        if page == "moving_over.md" and not Path(arguments[1]).exists():
            raise AssertionError(f"{arguments[1]} is nothing that the page has made")
        status, _, err = command(*arguments)
        assert status == 0, err
        ran += 1
        made = Path(arguments[2])
        assert made.exists()
        if arguments[1].endswith(".pt"):
            width = (45, 33) if arguments[1] == "flashoptim.pt" else (64, 32)
            other = flashdist.cast_model(nn.Linear(*width))
            opt = FlashAdamW(other.parameters())
            checkpoint.load(made, other, opt)
            assert opt.param_groups[0]["lr"] == 2e-3
            following = commands(page)[commands(page).index(arguments) + 1 :]
            if any(later[2] == arguments[2] for later in following):
                shutil.rmtree(made)
    assert ran >= 4
    if page == "moving_over.md":
        torch.load("back.pt", weights_only=True)


def test_help_shows_them(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    status, out, _ = command("convert", "--help")
    assert status == 0
    for text in ("flashdist convert run/step-1000 model --to hf", "flashdist convert adamw.pt", "--master-weight-bits"):
        assert text in out
