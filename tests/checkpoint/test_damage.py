"""A damaged checkpoint is named before anything is touched."""

from __future__ import annotations

import json
import pickle
import random

import pytest
import torch

from flashdist import checkpoint
from flashdist.checkpoint import CheckpointError
from flashdist.checkpoint.manifest import read_manifest
from tests.checkpoint.test_folder import make


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "c"
    checkpoint.save(path, *make(1), extra={"step": 2})
    return path


def snapshot(model, opt):
    tensors = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        tensors += [t.clone() for t in opt.state[p].values()]
    return tensors


def assert_refused(path, match):
    model, opt = make(5)
    before = snapshot(model, opt)
    rng = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(path, model, opt)
    with pytest.raises(CheckpointError, match=match):
        checkpoint.verify(path)
    assert all(map(torch.equal, before, snapshot(model, opt)))
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json"])
def test_flipped_bytes_and_truncations_are_found(saved, name):
    file = saved / name
    whole = file.read_bytes()
    draw = random.Random(name)
    for i in range(100):
        data = bytearray(whole)
        if i % 4 == 0:
            del data[draw.randrange(len(data)) :]
        else:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=name if name != "manifest.json" else "."):
            checkpoint.verify(saved)
    file.write_bytes(whole)
    checkpoint.verify(saved)


def test_a_flipped_byte_changes_nothing(saved):
    file = saved / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert_refused(saved, "rank-00000.safetensors is damaged")


def test_a_truncated_file(saved):
    file = saved / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert_refused(saved, "rank-00000.safetensors has .* bytes instead of")


def test_a_missing_file(saved):
    (saved / "rank-00000.safetensors").unlink()
    assert_refused(saved, "rank-00000.safetensors is missing")


def test_no_checkpoint_at_all(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    assert_refused(tmp_path / "nowhere", "no such folder")
    assert_refused(tmp_path / "empty", "no flashdist checkpoint")
    assert_refused(tmp_path / "file", "it is a file")


def test_a_newer_format(saved):
    document = json.loads((saved / "manifest.json").read_bytes())
    document["format_version"] = 99
    (saved / "manifest.json").write_text(json.dumps(document))
    assert_refused(saved, "format version 99")


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "[" * 100_000, '{"format":"flashdist-checkpoint"}', "\xff"])
def test_a_manifest_of_something_else(saved, text):
    (saved / "manifest.json").write_text(text, encoding="latin-1")
    assert_refused(saved, "manifest.json")


def test_a_manifest_cannot_name_files_elsewhere(saved):
    manifest = read_manifest(saved)
    manifest.files["../../secret"] = manifest.files.pop("rank-00000.safetensors")
    (saved / "manifest.json").write_bytes(manifest.to_bytes())
    assert_refused(saved, "outside of its folder")


class Payload:
    def __reduce__(self):
        return exec, ("raise SystemError('executed')",)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors", ".metadata"])
def test_a_planted_pickle_is_never_executed(saved, name):
    (saved / name).write_bytes(pickle.dumps(Payload()))
    model, opt = make(5)
    try:
        checkpoint.load(saved, model, opt)
    except CheckpointError:
        assert name != ".metadata"


def test_a_disk_that_fails_between_check_and_reading_says_what_state_things_are_in(saved, monkeypatch):
    from flashdist.checkpoint import reading

    whole, reads, broken_from = reading.read_box, [], 1 << 30

    def read_box(*args):
        reads.append(args)
        if len(reads) >= broken_from:
            raise OSError(5, "Input/output error")
        whole(*args)

    monkeypatch.setattr(reading, "read_box", read_box)
    checkpoint.load(saved, *make(5))
    broken_from = len(reads)
    reads.clear()
    with pytest.raises(CheckpointError, match=r"Input/output error.*partly overwritten"):
        checkpoint.load(saved, *make(5))
    broken_from = 1
    model, opt = make(5)
    before = snapshot(model, opt)
    with pytest.raises(CheckpointError, match=r"Input/output error.*nothing was loaded"):
        checkpoint.load(saved, model, opt)
    assert all(map(torch.equal, before, snapshot(model, opt)))
