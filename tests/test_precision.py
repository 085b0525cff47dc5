"""cast_model: what is cast, what it refuses, and that norms with running statistics stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from flashdist.precision import cast_model
from tests.support.precision_models import BF16, FP16, FP32, LanguageModel, dtypes, hooks, kept, snapshot


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (x + y).relu()


# What is cast


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_casts_in_place_by_rounding_to_nearest(dtype: torch.dtype):
    model = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Conv2d(3, 4, 3))
    objects, values = list(model.parameters()), [p.detach().clone() for p in model.parameters()]
    assert cast_model(model, dtype) is model
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    for parameter, value in zip(objects, values, strict=True):
        assert parameter.dtype == dtype
        assert torch.equal(parameter, value.to(dtype))


def test_default_is_bf16():
    assert set(dtypes(cast_model(LanguageModel())).values()) == {BF16}


def test_requires_grad_hooks_attributes_and_memory_format_stay():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Linear(4, 4)).to(memory_format=torch.channels_last)
    model[1].bias.requires_grad_(False)
    model[0].weight.tag = "mine"
    calls: list[str] = []
    model[0].weight.register_hook(lambda grad: calls.append("grad"))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    cast_model(model)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    assert not model[1].bias.requires_grad
    assert model[1].weight.requires_grad
    assert model[0].weight.tag == "mine"
    model[0](torch.randn(1, 4, 5, 5, dtype=BF16)).sum().backward()
    assert calls == ["grad", "accumulated"]
    assert model[0].weight.grad.dtype == BF16


def test_an_optimizer_built_before_trains_the_cast_model():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    cast_model(model)
    before = model.weight.detach().clone()
    model(torch.ones(2, 4, dtype=BF16)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 2)


def test_parametrizations_stay():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)))
    cast_model(model)
    assert set(dtypes(model)) == {
        "0.bias",
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
    }
    assert set(dtypes(model).values()) == {BF16}
    model(torch.randn(2, 4, dtype=BF16)).sum().backward()
    assert model[0].parametrizations.weight.original1.grad is not None


def test_integer_and_complex_parameters_are_left_alone():
    model = nn.Linear(2, 2)
    model.table = nn.Parameter(torch.arange(3), requires_grad=False)
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    cast_model(model)
    assert dtypes(model) == {"table": torch.int64, "phase": torch.complex64, "weight": BF16, "bias": BF16}


def test_buffers_are_not_cast():
    model = nn.Linear(2, 2)
    model.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 8, 2) / 8), persistent=False)
    model.register_buffer("router_bias", torch.full((3,), 0.1))
    model.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    before = {name: b.clone() for name, b in model.named_buffers()}
    cast_model(model)
    for name, buffer in model.named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer, before[name])
    assert model.weight.dtype == BF16


def test_recurrent_layers_are_flattened_again(monkeypatch):
    flattened: list[torch.dtype] = []
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda self: flattened.append(self.weight_hh_l0.dtype))
    model = nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 4))
    flattened.clear()
    cast_model(model)
    assert flattened == [BF16]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recurrent_layer_on_a_gpu_has_one_buffer_again():
    # In fp16: torch does not flatten bf16 weights, neither here nor in module.bfloat16().
    model = cast_model(nn.LSTM(4, 4, num_layers=2, device="cuda"), FP16)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    model(torch.randn(3, 2, 4, dtype=FP16, device="cuda"))[0].sum().backward()


def test_a_recurrent_layer_runs():
    model = cast_model(nn.Sequential(nn.LSTM(4, 4, num_layers=2)))
    output, _ = model(torch.randn(3, 2, 4, dtype=BF16))
    output.float().sum().backward()
    assert output.dtype == BF16
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_meta_parameters(dtype: torch.dtype):
    with torch.device("meta"):
        model = LanguageModel(tied=True)
    cast_model(model, dtype, keep_fp32=["*norm"])
    assert model.embed.weight.dtype == dtype
    assert all(p.is_meta for p in model.parameters())
    assert model.lm_head.weight is model.embed.weight
    assert kept(model) == {"blocks.0.norm.weight", "blocks.0.norm.bias", "norm.weight", "norm.bias"}


# Norms with running statistics


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_residual_block_trains(dtype: torch.dtype):
    torch.manual_seed(0)
    model = nn.Sequential(Residual(), Residual())
    reference = copy.deepcopy(model)
    cast_model(model, dtype)
    assert all(parameter_dtype == (FP32 if ".bn" in name else dtype) for name, parameter_dtype in dtypes(model).items())
    assert hooks(model) == {}
    x = torch.randn(4, 8, 6, 6)
    output = model(x.to(dtype))
    output.float().square().mean().backward()
    expected = reference(x)
    expected.square().mean().backward()
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, atol=0.06, rtol=0.06)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.grad.dtype == p.dtype, name
        cosine = torch.cosine_similarity(p.grad.float().flatten(), q.grad.flatten(), dim=0)
        assert cosine > 0.99, name
    for name, buffer in model.named_buffers():
        assert buffer.dtype == (torch.int64 if name.endswith("tracked") else FP32)
    torch.testing.assert_close(model[1].bn2.running_var, reference[1].bn2.running_var, atol=1e-2, rtol=1e-2)
    assert model.eval()(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(4), (6, 4)),
        (nn.BatchNorm2d(4), (2, 4, 3, 3)),
        (nn.BatchNorm3d(4), (2, 4, 2, 2, 2)),
        (nn.BatchNorm2d(4, track_running_stats=False), (2, 4, 3, 3)),
        (nn.BatchNorm2d(4, affine=False), (2, 4, 3, 3)),
        (nn.SyncBatchNorm(4), (2, 4, 3, 3)),
        (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (2, 4, 5)),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 3, 3)),
        (nn.InstanceNorm3d(4, track_running_stats=True), (2, 4, 2, 2, 2)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_norms_with_running_statistics_stay_and_run_natively(norm, shape, train, dtype, device):
    model = nn.Sequential(copy.deepcopy(norm), nn.Identity()).to(device)
    cast_model(model, dtype).train(train)
    assert all(t.dtype in (FP32, torch.int64) for t in [*model.parameters(), *model.buffers()])
    assert hooks(model) == {}
    x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    y = model(x)
    y.float().square().sum().backward()
    assert y.dtype == x.grad.dtype == dtype


def test_instance_norm_without_statistics_is_cast():
    model = cast_model(nn.Sequential(nn.InstanceNorm2d(4, affine=True)))
    assert kept(model) == set()
    assert model(torch.randn(2, 4, 3, 3, dtype=BF16)).dtype == BF16


def test_a_norm_that_is_already_16_bit_returns_to_fp32():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16()
    cast_model(model)
    assert kept(model) == {"1.weight", "1.bias"}
    assert model[1].running_mean.dtype == model[1].running_var.dtype == FP32


# Refusals


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.complex64, torch.float64, torch.float32, torch.float8_e4m3fn, None]
)
def test_other_targets_are_an_error(dtype):
    with pytest.raises(ValueError, match=f"must be torch.bfloat16 or torch.float16, got {dtype}"):
        cast_model(nn.Linear(2, 2), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("keep", [[], ["1"]])
def test_other_parameter_dtypes_are_an_error(dtype: torch.dtype, keep: list[str]):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(dtype))
    before = snapshot(model)
    with pytest.raises(ValueError, match=rf"'1\.weight' is {dtype}"):
        cast_model(model, keep_fp32=keep)
    assert snapshot(model) == before


def test_a_gradient_in_the_old_dtype_is_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias.grad = torch.zeros(2)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"'1\.bias' has a gradient.*zero_grad"):
        cast_model(model)
    assert snapshot(model) == before
    cast_model(model, keep_fp32=["1.bias"])
    assert model[1].bias.grad is not None


@pytest.mark.parametrize("value", [65520.0, -1e30, float("inf")])
def test_a_weight_beyond_fp16_is_an_error(value: float):
    model = nn.Linear(2, 2)
    model.bias.data[1] = value
    with pytest.raises(ValueError, match=r"'bias' reaches .* beyond fp16"):
        cast_model(model, FP16)
    cast_model(model, BF16)


def test_the_largest_fp16_weight_is_cast():
    model = nn.Linear(2, 2)
    model.bias.data[:] = torch.tensor([65519.0, float("nan")])
    cast_model(model, FP16)
    assert model.bias[0] == 65504
    assert model.bias[1].isnan()


def test_an_empty_parameter_has_no_range():
    model = nn.Linear(2, 2)
    model.empty = nn.Parameter(torch.zeros(0, 2))
    cast_model(model, FP16)
    assert model.empty.dtype == FP16


def test_a_lazy_parameter_is_an_error():
    with pytest.raises(ValueError, match=r"'0\.weight' is not initialised"):
        cast_model(nn.Sequential(nn.LazyLinear(3)))


def test_an_fsdp1_flat_parameter_is_an_error():
    model = nn.Linear(2, 2)
    model.weight._is_flat_param = True  # the mark that torch's FlatParameter carries
    with pytest.raises(ValueError, match="'weight' is an FSDP1 flat parameter"):
        cast_model(model)
