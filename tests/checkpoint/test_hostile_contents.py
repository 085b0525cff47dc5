"""Names that meet, and manifests that were forged with a checksum that fits: refused, or kept apart."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from flashdist import checkpoint
from flashdist.checkpoint.manifest import _canonical


@pytest.fixture
def saved(tmp_path):
    model = nn.Linear(6, 8)
    checkpoint.save(tmp_path / "c", model, None)
    return tmp_path / "c", model


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [3, 6]},
        {"sizes": [10**9, 6]},
        {"sizes": [8]},
        {"offsets": [4, 0]},
        {"offsets": [-1, 0]},
        {"start": -8},
        {"start": 10**9},
        {"start": "8"},
        None,
        "twice",
        "overlapping",
    ],
    ids=str,
)
def test_pieces_that_do_not_make_up_a_tensor_are_refused_and_nothing_is_changed(saved, change):
    path, model = saved
    file = path / "manifest.json"
    body = json.loads(file.read_bytes())["body"]
    stored = body["tensors"]["model.weight"]
    (piece,) = stored["pieces"]
    if change is None:
        stored["pieces"] = []
    elif change == "twice":
        stored["pieces"] = [piece, piece]
    elif change == "overlapping":  # the volume of the whole, with a hole
        stored["pieces"] = [{**piece, "sizes": [4, 6]}, {**piece, "sizes": [4, 6], "offsets": [2, 0]}]
    else:
        piece.update(change)
    file.write_bytes(_canonical(body))
    nn.init.zeros_(model.weight)
    with pytest.raises(checkpoint.CheckpointError, match="forged"):
        checkpoint.verify(path)
    with pytest.raises(checkpoint.CheckpointError, match="forged"):
        checkpoint.load(path, model, None)
    assert not model.weight.any()


def test_tensors_in_extra_whose_places_read_alike_are_kept_apart(tmp_path):
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "c", model, None, extra={"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}})
    found = checkpoint.load(tmp_path / "c", model, None)
    assert torch.equal(found["a.b"], torch.ones(2))
    assert torch.equal(found["a"]["b"], torch.zeros(2))


def test_tensors_that_would_share_a_name_are_refused(tmp_path):
    model = nn.Linear(2, 2)
    model._orig_mod = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="two tensors of the model are called weight"):
        checkpoint.save(tmp_path / "c", model, None)
    assert list(tmp_path.iterdir()) == []


def test_lazily_negated_views_are_saved_by_value(tmp_path):
    values = torch.arange(1.0, 7.0).view(2, 3)
    model = nn.Linear(2, 2)
    extra = {"negated": torch._neg_view(values), "transposed": torch._neg_view(values).t()}
    checkpoint.save(tmp_path / "c", model, None, extra=extra)
    found = checkpoint.load(tmp_path / "c", model, None)
    assert torch.equal(found["negated"], -values)
    assert torch.equal(found["transposed"], -values.t())
