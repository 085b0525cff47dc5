"""Bad input of ``flashdist convert``: one line with the remedy, exit status 2, and nothing left behind."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch import nn

from flashdist import checkpoint
from flashdist.convert import run
from tests.checkpoint.test_contents import make, train


@pytest.fixture
def folder(tmp_path):
    """A flashdist checkpoint ``c`` and a file of torch ``a.pt``."""
    model, opt = make()
    checkpoint.save(tmp_path / "c", model, opt)
    linear = nn.Linear(40, 8)
    reference = torch.optim.AdamW(linear.parameters())
    train(linear, reference, 2)
    torch.save({"model": linear.state_dict(), "optimizer": reference.state_dict()}, tmp_path / "a.pt")
    return tmp_path


class Payload:
    def __reduce__(self):
        return exec, ("raise SystemError('executed')",)


def change(folder, edit):
    found = torch.load(folder / "a.pt", weights_only=True)
    edit(found)
    torch.save(found, folder / "a.pt")


def refused(command, folder, *arguments):
    """The one line that a conversion to ``out`` is refused with."""
    before = sorted(file.name for file in folder.iterdir())
    status, out, err = command("convert", *arguments)
    lines = [line for line in err.splitlines() if line.startswith("flashdist:")]
    assert (status, out, len(lines)) == (2, "", 1), err
    assert "Traceback" not in err
    assert sorted(file.name for file in folder.iterdir()) == before
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing", "out", "--to", "hf"], "there is nothing at"),
        (["c", "out", "--to", "gguf"], "--to must be one of hf, safetensors-fp32, torch-adamw, flashdist, got 'gguf'"),
        (["c", "out", "--to", "hf", "--from", "jax"], "--from must be one of flashdist"),
        (["c", "out", "--to", "flashdist"], "is of flashdist already"),
        (["c", "a.pt", "--to", "hf"], "exists: convert to another path"),
        (["c", "out", "--to", "hf", "--dtype", "int8"], "--dtype must be one of"),
        (["c", "out", "--to", "torch-adamw", "--dtype", "bf16"], "--dtype is for --to hf"),
        (["c", "out", "--to", "hf", "--config", "c"], "has no config.json"),
        (["c", "out", "--to", "hf", "--config", "no"], "does not exist"),
        (["c", "out", "--to", "hf", "--weights", "a.pt"], "leave it out"),
        (["c", "out", "--to", "hf", "--from", "torch-adamw"], "is a folder"),
        (["a.pt", "out", "--to", "hf", "--from", "flashdist"], "it is a file"),
        (["a.pt", "out", "--to", "hf", "--from", "deepspeed"], "is no folder"),
        (["c", "out", "--to", "hf", "--from", "deepspeed"], "holds no DeepSpeed checkpoint"),
        (["a.pt", "out", "--to", "flashdist", "--from", "bitsandbytes"], "of another optimizer"),
        (["a.pt", "out", "--to", "flashdist", "--master-weight-bits", "16"], "must be 24 or 32"),
        (["a.pt", "out", "--to", "flashdist", "--names", "a.pt"], "--names"),
        (["a.pt", "out", "--to", "flashdist", "--weights", "c"], "cannot be read as safetensors"),
    ],
)
def test_arguments(command, folder, monkeypatch, arguments, text):
    monkeypatch.chdir(folder)
    assert text in refused(command, folder, *arguments)


@pytest.mark.parametrize("name", ["c/rank-00000.safetensors", "c/manifest.json", "a.pt"])
@pytest.mark.parametrize("how", ["cut", "changed", "empty"])
def test_damaged_files(command, folder, name, how):
    file = folder / name
    data = file.read_bytes()
    changed = data[: len(data) // 2] + bytes(200) + data[len(data) // 2 + 200 :]
    if name == "a.pt":  # a changed value of a tensor is one: torch's files have no checksum that torch looks at
        changed = data[:200] + bytes(100) + data[300:]
    file.write_bytes({"cut": data[:-2000], "changed": changed, "empty": b""}[how])
    to = "flashdist" if name == "a.pt" else "safetensors-fp32"
    assert name.split("/")[0] in refused(command, folder, folder / name.split("/")[0], folder / "out", "--to", to)


def test_no_pickle_is_executed(command, folder):
    change(folder, lambda found: found.update(extra=Payload()))
    for options in ([], ["--from", "torch-adamw"], ["--from", "flashoptim"]):
        said = refused(command, folder, folder / "a.pt", folder / "out", "--to", "flashdist", *options)
        assert "exec, which could run code" in said
        assert "nothing was executed" in said
    (folder / "zero").mkdir()
    planted = folder / "zero" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"param_shapes": [{}]}, folder / "zero" / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": Payload()}, planted)
    assert "refers to exec" in refused(command, folder, folder / "zero", folder / "out", "--to", "flashdist")
    planted.write_bytes(pickle.dumps(Payload()))
    assert str(planted) in refused(command, folder, folder / "zero", folder / "out", "--to", "flashdist")


def _less(found):
    del found["model"]["bias"]


def _missing(found):
    del found["optimizer"]["state"][0]["exp_avg_sq"]


def _stepless(found):
    del found["optimizer"]["state"][0]["step"]


def _misshaped(found):
    found["optimizer"]["state"][0]["exp_avg_sq"] = torch.zeros(8, 41)


def _other_model(found):
    found["model"]["weight"] = torch.zeros(9, 40)


def _amsgrad(found):
    found["optimizer"]["param_groups"][0]["amsgrad"] = True


def _adam(found):
    found["optimizer"]["param_groups"][0]["decoupled_weight_decay"] = False


def _unlisted(found):
    found["optimizer"]["state"][7] = found["optimizer"]["state"][0]


def _negative(found):
    found["optimizer"]["param_groups"][0]["lr"] = -1.0


def _empty(found):
    found["optimizer"]["state"].clear()


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (_less, "do not fit the model's 1 tensors"), (_missing, "of another optimizer"), (_stepless, "step"),
        (_misshaped, "exp_avg_sq of weight as torch.float32 of shape (8, 41)"), (_other_model, "do not fit"),
        (_amsgrad, "amsgrad=True"), (_adam, "torch.optim.Adam"), (_unlisted, "list different parameters"),
        (_negative, "lr"), (_empty, "after the first step"),
    ],
)  # fmt: skip
def test_contents_that_do_not_fit(command, folder, edit, text):
    change(folder, edit)
    arguments = (folder / "a.pt", folder / "out", "--to", "flashdist", "--from", "torch-adamw")
    assert text in refused(command, folder, *arguments)


def test_missing_tensors_of_weights(command, folder):
    (folder / "hf").mkdir()
    (folder / "hf" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"weight": "gone.safetensors"}})
    )
    said = refused(command, folder, folder / "a.pt", folder / "out", "--to", "flashdist", "--weights", folder / "hf")
    assert "gone.safetensors cannot be read as safetensors" in said


@pytest.mark.parametrize("to", run.TARGETS[:3])
def test_nothing_is_left_after_an_error(folder, monkeypatch, to):
    before = sorted(file.name for file in folder.iterdir())

    def fail(written, total):
        if written > total // 3:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        run.convert(folder / "c", folder / "out", to, progress=fail)
    with pytest.raises(OSError, match="the disk is gone"):
        run.convert(folder / "a.pt", folder / "out", "flashdist", progress=fail)
    assert sorted(file.name for file in folder.iterdir()) == before


def test_the_progress_ends_at_what_was_planned(folder):
    told = []
    for source, to in (("c", "hf"), ("c", "torch-adamw"), ("c", "safetensors-fp32"), ("a.pt", "flashdist")):
        run.convert(folder / source, folder / f"out-{to}", to, progress=lambda *counts: told.append(counts))
        assert told[-1][0] == pytest.approx(told[-1][1], rel=0.01)


def test_a_small_disk_is_noticed_before(folder, monkeypatch, command):
    class Usage:
        free = 1000

    monkeypatch.setattr(run.shutil, "disk_usage", lambda _: Usage)
    assert "make room" in refused(command, folder, folder / "c", folder / "out", "--to", "hf")
