"""cast_model: tied weights, and DTensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from flashdist.precision import cast_model
from tests.support.precision_models import BF16, FP16, FP32, LanguageModel, dtypes, kept, snapshot

# Ties


def test_tied_weights_stay_one_parameter():
    model = LanguageModel(tied=True)
    weight = model.embed.weight
    cast_model(model)
    assert model.lm_head.weight is model.embed.weight is weight
    assert weight.dtype == BF16


def test_tied_weights_can_be_kept_together():
    model = cast_model(LanguageModel(tied=True), keep_fp32=["embed", "lm_head"])
    assert kept(model) == {"embed.weight", "lm_head.weight"}
    assert model(torch.tensor([[1, 2]])).dtype == BF16


@pytest.mark.parametrize(("keep", "other"), [("embed", "lm_head"), ("lm_head", "embed")])
@pytest.mark.parametrize("same_object", [True, False])
def test_tied_weights_of_which_one_is_kept_are_an_error(keep: str, other: str, same_object: bool):
    model = LanguageModel(tied=True)
    if not same_object:
        model.lm_head.weight = nn.Parameter(model.embed.weight.data)
    before = snapshot(model)
    with pytest.raises(ValueError, match=f"'{keep}.weight' and '{other}.weight' are tied"):
        cast_model(model, keep_fp32=[keep])
    assert snapshot(model) == before


def test_a_batch_norm_weight_tied_to_a_cast_one_is_an_error():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"'0\.weight' and '1\.weight' are tied"):
        cast_model(model)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_two_parameters_on_one_view_become_one(device: str):
    model = LanguageModel().to(device)
    first = model.embed.weight
    model.lm_head.weight = second = nn.Parameter(first.data)
    model.extra = nn.Linear(8, 11, bias=False)
    model.extra.weight = second
    cast_model(model)
    assert model.lm_head.weight is model.extra.weight is model.embed.weight is first
    assert first.dtype == second.dtype == BF16
    if device == "cpu":
        assert second.data_ptr() == first.data_ptr()


def test_two_parameters_on_one_view_that_differ_are_an_error():
    model = LanguageModel()
    model.lm_head.weight = nn.Parameter(model.embed.weight.data, requires_grad=False)
    with pytest.raises(ValueError, match="differ in requires_grad"):
        cast_model(model)
    model.lm_head.weight.requires_grad_(True).register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match=r"'lm_head\.weight' becomes .* lose its hooks"):
        cast_model(model)


@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w[2:]], ids=["transposed", "part"])
def test_other_overlapping_views_are_an_error(view):
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(4, 4))
    model.b = nn.Parameter(view(model.a.data))
    with pytest.raises(ValueError, match="'a' and 'b' are different views of the same memory"):
        cast_model(model)


def test_overlapping_views_that_keep_their_dtype_are_left_alone():
    model = nn.Module()
    model.fused = nn.Parameter(torch.zeros(4, 4))
    model.part = nn.Parameter(model.fused.data[2:])
    model.other = nn.Parameter(torch.zeros(4))
    cast_model(model, keep_fp32=["fused", "part"])
    assert model.part.untyped_storage().data_ptr() == model.fused.untyped_storage().data_ptr()
    assert model.other.dtype == BF16


def test_disjoint_slices_of_one_storage_are_cast_apart():
    flat = torch.arange(12.0)
    model = nn.Module()
    for index in range(3):
        model.register_parameter(f"p{index}", nn.Parameter(flat[4 * index : 4 * index + 4]))
    cast_model(model, keep_fp32=["p1"])
    assert dtypes(model) == {"p0": BF16, "p1": FP32, "p2": BF16}
    assert torch.equal(torch.cat([p.float() for p in model.parameters()]), flat)


def test_an_empty_slice_overlaps_nothing():
    flat = torch.zeros(8)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:6]), nn.Parameter(flat[2:2])
    cast_model(model, keep_fp32=["a"])
    assert dtypes(model) == {"a": FP32, "b": BF16}


# Wrapper subclasses


class Pair(torch.Tensor):
    """A tensor that is the sum of two inner ones, which it keeps as ordinary attributes."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        a, b = ([getattr(x, part) if isinstance(x, Pair) else x for x in args] for part in ("a", "b"))
        return Pair(func(*a, **(kwargs or {})), func(*b, **(kwargs or {})))


def test_a_wrapper_that_keeps_its_parts_in_attributes():
    model = nn.Module()
    model.weight = weight = nn.Parameter(Pair(torch.ones(3), torch.full((3,), 2.0)))
    weight.tag = "mine"
    cast_model(model)
    assert model.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.tag == "mine"
    assert weight.dtype == weight.a.dtype == weight.b.dtype == BF16
    assert (weight.a[0], weight.b[0]) == (1, 2)


# DTensors


@pytest.fixture
def mesh(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_dtensor_parameters_keep_identity_placements_and_hooks(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    model = nn.Linear(6, 5)
    value = model.weight.detach().clone()
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [Shard(0)]))
    model.bias = nn.Parameter(distribute_tensor(model.bias.data, mesh, [Replicate()]))
    weight, bias, fired = model.weight, model.bias, []
    weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.dtype))
    cast_model(model, keep_fp32=["bias"])
    assert model.weight is weight
    assert isinstance(weight, DTensor)
    assert isinstance(weight, nn.Parameter)
    assert weight.placements == (Shard(0),)
    assert weight.dtype == weight.to_local().dtype == weight.full_tensor().dtype == (weight + 1).dtype == BF16
    assert torch.equal(weight.full_tensor(), value.bfloat16())
    assert bias.dtype == bias.to_local().dtype == FP32
    weight.sum().backward()
    assert weight.grad.to_local().dtype == BF16
    assert fired == [BF16]


def test_dtensor_range_and_ties_look_at_the_shard(mesh):
    from torch.distributed.tensor import DTensor, Shard

    local = torch.full((4, 4), 1e6)
    model = nn.Module()
    model.a = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
    model.b = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="beyond fp16"):
        cast_model(model, FP16)
    with pytest.raises(ValueError, match="'a' and 'b' are tied"):
        cast_model(model, keep_fp32=["a"])
    cast_model(model)
    assert model.b is model.a
    assert model.a.to_local().dtype == BF16


def test_fsdp2_before_and_after_the_first_forward(mesh):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    reference = cast_model(copy.deepcopy(model), keep_fp32=["1"])
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    cast_model(model, keep_fp32=["1"])
    x = torch.randn(2, 4, dtype=BF16)
    output = model(x)
    assert torch.equal(output, reference(x))
    output.sum().backward()
    assert [p.grad.to_local().dtype for p in model.parameters()] == [BF16, BF16, FP32, FP32, BF16, BF16]
    model.zero_grad()
    with pytest.raises(RuntimeError, match="has run already"):
        cast_model(model, FP16)
