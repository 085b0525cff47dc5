"""Manifests and files that say what no save writes, with checksums that fit: refused before anything is changed."""

from __future__ import annotations

import copy
import hashlib
import json
import random

import numpy
import pytest
import safetensors.torch
import torch
from torch import nn

from flashdist import FlashAdamW, checkpoint
from flashdist.checkpoint.manifest import _canonical
from tests.checkpoint.test_folder import make

JUNK = (None, -1, 0, 1.5, "x", "", [], {}, True, 1 << 70, [1], ["model.weight"], {"$tuple": 3}, {"$tensor": "none"})


def everything(model, opt, scheduler):
    """All that a load may change, as bytes and text."""
    tensors = [*model.state_dict().values()]
    tensors += [value for p in model.parameters() for value in opt.state[p].values()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]
    generators = (torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state()))  # noqa: NPY002 - the one that is saved
    return [t.tolist() for t in tensors], groups, generators, repr(scheduler.state_dict())


def scheduled(seed):
    model, opt = make(seed)
    return model, opt, torch.optim.lr_scheduler.MultiStepLR(opt, [3, 5])


@pytest.fixture
def saved(tmp_path):
    model, opt, scheduler = scheduled(1)
    extra = {"step": (2, 3), "average": torch.arange(4.0)}
    checkpoint.save(tmp_path / "c", model, opt, scheduler=scheduler, extra=extra)
    return tmp_path / "c"


def places(value, at=()):
    """The places in a JSON value, as keys from the outside in."""
    yield at
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*at, key))


def error_of(load):
    try:
        load()
    except Exception as error:
        return error
    return None


def changed(body, at, junk):
    body = copy.deepcopy(body)
    inner = body
    for key in at[:-1]:
        inner = inner[key]
    if junk is KeyError and isinstance(inner, dict):
        del inner[at[-1]]
    else:
        inner[at[-1]] = None if junk is KeyError else junk
    return body


def test_whatever_a_manifest_holds_a_load_is_done_or_nothing_is_changed(saved):
    file = saved / "manifest.json"
    body = json.loads(file.read_bytes())["body"]
    draw = random.Random(0)
    every = [at for at in places(body) if at]
    refused = 0
    model, opt, scheduler = scheduled(5)
    before = everything(model, opt, scheduler)
    for i in range(600):
        at, junk = (every[i], KeyError) if i < len(every) else (draw.choice(every), draw.choice(JUNK))
        file.write_bytes(_canonical(changed(body, at, junk)))
        error = error_of(lambda: checkpoint.load(saved, model, opt, scheduler=scheduler))  # noqa: B023 - called at once
        if error is None:
            model, opt, scheduler = scheduled(5)
            before = everything(model, opt, scheduler)
            continue
        refused += 1
        assert isinstance(error, checkpoint.CheckpointError | ValueError), (at, junk, error)
        assert everything(model, opt, scheduler) == before, (at, junk, error)
    assert refused > 300


def forge(folder, tensors):
    """Replace tensors of a checkpoint of one rank, with checksums, shapes and dtypes that fit."""
    file = folder / "rank-00000.safetensors"
    held = {**safetensors.torch.load_file(file), **tensors}
    safetensors.torch.save_file(held, file)
    data = file.read_bytes()
    header = int.from_bytes(data[:8], "little")
    places = json.loads(data[8 : 8 + header])
    manifest = json.loads((folder / "manifest.json").read_bytes())["body"]
    manifest["files"][file.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    for name, tensor in held.items():
        shape = list(tensor.shape)
        start = 8 + header + places[name]["data_offsets"][0]
        piece = {"file": file.name, "start": start, "offsets": [0] * len(shape), "sizes": shape}
        dtype = str(tensor.dtype).removeprefix("torch.")
        manifest["tensors"][name] = {"dtype": dtype, "shape": shape, "pieces": [piece] if tensor.numel() else []}
    (folder / "manifest.json").write_bytes(_canonical(manifest))


@pytest.mark.parametrize(
    ("name", "forged"),
    [
        ("torch", torch.zeros(9, dtype=torch.uint8)),
        ("torch", torch.zeros(5056)),
        ("python", torch.zeros(4, dtype=torch.int64)),
        ("python", torch.full((626,), -1, dtype=torch.int64)),
        ("python_gauss", torch.zeros(2, 2)),
        ("numpy", torch.zeros(3, dtype=torch.int64)),
        ("numpy", torch.full((626,), 1 << 40, dtype=torch.int64)),
        ("numpy_gauss", torch.zeros(0)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.dtype}{list(value.shape)}",
)
def test_a_random_state_that_is_none_is_refused_before_anything_is_changed(saved, name, forged):
    forge(saved, {})
    checkpoint.load(saved, *make(5))  # the forger's work is good
    forge(saved, {f"rng.0.{name}": forged})
    model, opt, scheduler = scheduled(5)
    before = everything(model, opt, scheduler)
    with pytest.raises(ValueError, match=f"random state '{name.removesuffix('_gauss')}' is none"):
        checkpoint.load(saved, model, opt, scheduler=scheduler)
    assert everything(model, opt, scheduler) == before


STATES = {
    "step": [torch.zeros(2), torch.zeros((), dtype=torch.complex64)],
    "error": [torch.zeros(2, dtype=torch.int8), torch.zeros(8, 64)],
    "exp_avg": [torch.zeros(8, 64, dtype=torch.uint8), torch.zeros(8, 32, dtype=torch.int8)],
    "exp_avg_scale": [torch.ones(8, 2), torch.ones(8, 3, dtype=torch.float16)],
    "exp_avg_sq": [torch.zeros(8, 64, dtype=torch.int8)],
    "exp_avg_sq_scale": [torch.ones(8, 2, dtype=torch.bfloat16)],
}


@pytest.mark.parametrize(("key", "forged"), [(key, value) for key, values in STATES.items() for value in values])
def test_a_state_that_is_none_is_refused_before_anything_is_changed(tmp_path, key, forged):
    def build():
        model = nn.Linear(64, 8, bias=False).bfloat16()
        return model, FlashAdamW(model.parameters(), lr=0.1)

    checkpoint.save(tmp_path / "c", *build())
    if forged.dtype == torch.complex64:  # which files of checkpoints do not hold
        forged = torch.zeros((), dtype=torch.bool)
    forge(tmp_path / "c", {f"optim.weight.{key}": forged})
    model, opt = build()
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"the checkpoint's \w+ of weight"):
        checkpoint.load(tmp_path / "c", model, opt)
    assert torch.equal(model.weight, before)
    assert not opt.state


def test_a_scheduler_of_another_class_is_refused(saved):
    model, opt, _ = scheduled(5)
    other = torch.optim.lr_scheduler.StepLR(opt, 2)
    before = everything(model, opt, other)
    with pytest.raises(ValueError, match="of class MultiStepLR, StepLR was given"):
        checkpoint.load(saved, model, opt, scheduler=other)
    assert everything(model, opt, other) == before


def test_the_parts_of_a_scheduler_are_compared_too(tmp_path):
    def build(second):
        model, opt = make(1)
        parts = [torch.optim.lr_scheduler.LinearLR(opt), second(opt)]
        return model, opt, torch.optim.lr_scheduler.SequentialLR(opt, parts, [2])

    model, opt, scheduler = build(lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5))
    checkpoint.save(tmp_path / "c", model, opt, scheduler=scheduler)
    checkpoint.load(tmp_path / "c", model, opt, scheduler=scheduler)
    model, opt, scheduler = build(lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9))
    with pytest.raises(ValueError, match=r"SequentialLR\(LinearLR, CosineAnnealingLR\), SequentialLR\(LinearLR, Exp"):
        checkpoint.load(tmp_path / "c", model, opt, scheduler=scheduler)


def test_a_checkpoint_that_does_not_name_its_scheduler_is_loaded(saved):
    file = saved / "manifest.json"
    body = json.loads(file.read_bytes())["body"]
    del body["values"]["scheduler_class"]
    file.write_bytes(_canonical(body))
    model, opt, scheduler = scheduled(5)
    checkpoint.load(saved, model, opt, scheduler=scheduler)


class Tagged(torch.Tensor):
    pass


ODD = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "subclass": lambda: torch.ones(2).as_subclass(Tagged),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("kind", ODD)
def test_tensors_that_would_not_come_back_are_refused_with_their_place(tmp_path, kind):
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"extra\.a\.1 is .*which a checkpoint does not take"):
        checkpoint.save(tmp_path / "c", model, None, extra={"a": [1, ODD[kind]()]})
    assert list(tmp_path.iterdir()) == []
