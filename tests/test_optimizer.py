"""The step as users see it: what changes, what does not, groups, gradients of any layout, schedulers, ties."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashdist
from flashdist import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from tests.support.backends import (
    BF16,
    FP16,
    FP32,
    BackendUnderTest,
    assert_same,
    assert_same_bits,
    assert_unchanged,
    master_weights,
    parameters,
    set_gradients,
    snapshot,
    train,
)

SHAPES = [(), (0,), (33,), (5, 7), (3, 33), (2, 64)]
ALL: list[tuple[Any, dict[str, Any]]] = [
    (FlashAdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (FlashAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    (FlashLion, {"lr": 1e-2, "weight_decay": 0.1}),
    (FlashSGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    (FlashSGDW, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
]
every_optimizer = pytest.mark.parametrize(("cls", "arguments"), ALL, ids=[cls.__name__ for cls, _ in ALL])


@every_optimizer
def test_a_zero_gradient_step_of_lr_zero_on_fresh_state_changes_nothing(
    backend: BackendUnderTest, cls: Any, arguments: dict[str, Any]
):
    # torch's get_optimizer_state_dict takes such a step to create state.
    params = parameters(SHAPES, device=backend.device)
    opt = backend.build(cls, params, **{**arguments, "lr": 0.0, "weight_decay": 0.0})
    opt.state_dict()
    before = snapshot(opt)
    set_gradients(params, seed=0, scale=0.0)
    opt.step()
    for old in before:
        old["step"] += 1
    assert_unchanged(opt, before)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@every_optimizer
def test_lr_zero_never_changes_weights_or_corrections(
    backend: BackendUnderTest, cls: Any, arguments: dict[str, Any], dtype: torch.dtype
):
    params = parameters([(33,), (2, 64)], dtype, device=backend.device)
    opt = backend.build(cls, params, **arguments)
    train(opt, 2)
    before = snapshot(opt)
    opt.param_groups[0]["lr"] = 0.0
    train(opt, 2, first=2)
    for p, old in zip(params, before, strict=True):
        assert_same_bits(p, old["weight"], "weight")
        if dtype != FP32:
            assert_same_bits(opt.state[p]["error"], old["error"], "corrections")
        moved = [k for k in old if k not in ("weight", "error", "step") and not torch.equal(opt.state[p][k], old[k])]
        assert moved, "the moments have to go on"


@every_optimizer
def test_two_runs_are_equal_bit_for_bit(backend: BackendUnderTest, cls: Any, arguments: dict[str, Any]):
    runs = []
    for _ in range(2):
        opt = backend.build(cls, parameters([(33,), (3, 33)], device=backend.device), **arguments)
        train(opt, 2)
        runs.append(opt)
    assert_same(*runs)


def test_learning_at_all(backend: BackendUnderTest):
    """A regression whose optimum is known: the weights arrive there, the loss falls tenfold."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(2, 64, generator=generator) * 0.5
    p = nn.Parameter(torch.zeros(2, 64, dtype=BF16, device=backend.device))
    opt = backend.build(FlashAdamW, [p], lr=0.1, weight_decay=0.0)
    losses = []
    for _ in range(20):
        loss = (p.float() - target.to(p.device)).square().mean()
        losses.append(float(loss.detach()))
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert losses[-1] < losses[0] / 10


def test_case_28_three_dtypes_in_one_optimizer(backend: BackendUnderTest):
    params = [p for dtype in (BF16, FP16, FP32) for p in parameters([(2, 40), (5,)], dtype, device=backend.device)]
    opt = backend.build(FlashAdamW, params, lr=1e-2)
    before = snapshot(opt)
    for t in range(2):
        for pair in (params[:2], params[2:4], params[4:]):
            set_gradients(pair, seed=t)
        opt.step()
    errors = [opt.state[p]["error"].dtype if "error" in opt.state[p] else None for p in params]
    assert errors == [torch.int8, torch.int16, torch.int8, torch.int16, None, None]
    assert all(not torch.equal(p, old["weight"]) for p, old in zip(params, before, strict=True))
    masters = master_weights(opt)
    assert all(m.dtype == FP32 for m in masters)
    # All start at and follow the same numbers, as far as 16 bits hold them: 2^-8 of weights of about 0.5, and in each
    # step a share of lr that the 8-bit moments of different gradients may differ by.
    for wide, narrow in zip(masters[4:] * 2, masters[:4], strict=True):
        torch.testing.assert_close(wide, narrow, rtol=2**-8, atol=2e-3)


def test_settings_per_group(backend: BackendUnderTest):
    params = parameters([(2, 64)] * 4, device=backend.device)
    groups = [
        {"params": params[:1]},
        {"params": params[1:2], "quantize": False},
        {"params": params[2:3], "master_weight_bits": 32},
        {"params": params[3:], "master_weight_bits": None},
    ]
    opt = backend.build(FlashAdamW, groups, lr=1e-2)
    train(opt, 1)
    formats = [{k: v.dtype for k, v in opt.state[p].items()} for p in params]
    codes = {
        "step": FP32, "exp_avg": torch.int8, "exp_avg_scale": BF16, "exp_avg_sq": torch.uint8, "exp_avg_sq_scale": FP32,
    }  # fmt: skip
    assert formats[0] == {**codes, "error": torch.int8}
    assert formats[1] == {"step": FP32, "error": torch.int8, "exp_avg": FP32, "exp_avg_sq": FP32}
    assert formats[2] == {**codes, "error": torch.int16}
    assert formats[3] == codes


def test_master_weight_is_finer_than_the_weight(backend: BackendUnderTest):
    p = nn.Parameter(torch.ones(2, 32, dtype=BF16, device=backend.device))
    opt = backend.build(FlashSGD, [p], lr=1.0)
    p.grad = torch.full_like(p, 2.0**-12)
    opt.step()
    assert torch.equal(p, torch.ones_like(p))
    assert torch.equal(opt.master_weight(p).cpu(), torch.full((2, 32), 1 - 2.0**-12))


def test_case_31_gradients_and_parameters_of_any_layout(backend: BackendUnderTest):
    """A chunk view, an expanded and a transposed gradient; a transposed and a channels_last parameter."""

    def build(plain: bool) -> tuple[Any, list[nn.Parameter]]:
        values = [
            p.data for p in parameters([(4, 33), (4, 33), (40, 3), (4, 33), (4, 16, 3, 3)], device=backend.device)
        ]
        if not plain:
            values[3] = values[3].t().contiguous().t()
            values[4] = values[4].to(memory_format=torch.channels_last)
            assert not values[3].is_contiguous()
            assert not values[4].is_contiguous()
        params = [nn.Parameter(v) for v in values]
        return backend.build(FlashAdamW, params, lr=1e-2), params

    plain, strided = build(True), build(False)
    for t in range(2):
        generator = torch.Generator().manual_seed(t)
        wide = torch.randn(4, 66, generator=generator).to(BF16).to(backend.device)
        one = torch.randn(1, 33, generator=generator).to(BF16).to(backend.device)
        turned = torch.randn(3, 40, generator=generator).to(BF16).to(backend.device)
        picture = torch.randn(4, 16, 3, 3, generator=generator).to(BF16).to(backend.device)
        grads = [wide.chunk(2, dim=1)[1], one.expand(4, 33), turned.t(), wide[:, :33], picture]
        for (opt, params), contiguous in ((plain, True), (strided, False)):
            for p, g in zip(params, grads, strict=True):
                p.grad = g.clone(memory_format=torch.contiguous_format) if contiguous else g
            if not contiguous:
                params[4].grad = picture.to(memory_format=torch.channels_last)
            opt.step()
    assert not strided[1][4].is_contiguous()
    assert_same(plain[0], strided[0])


def test_case_32_frozen_unfrozen_and_missing_gradients(backend: BackendUnderTest):
    params = parameters([(2, 32), (33,), (2, 32)], device=backend.device)
    opt = backend.build(FlashAdamW, params[:2], lr=1e-2)
    for t in range(6):
        params[0].requires_grad_(t not in (1, 2))
        opt.zero_grad()
        set_gradients([p for p in params[:2] if p.requires_grad], seed=t)
        if t == 4:
            params[1].grad = None
        if t == 5:
            opt.add_param_group({"params": [params[2]], "lr": 1e-3})
            set_gradients(params[2:], seed=t)
        opt.step()
    assert [float(opt.state[p]["step"]) for p in params] == [4.0, 5.0, 1.0]
    assert opt.param_groups[1]["betas"] == (0.9, 0.999)


def test_case_11_a_default_dtype_of_bf16_does_not_coarsen_the_step_count(backend: BackendUnderTest):
    steps = 300 if backend.name == "eager" or backend.device.type == "cuda" else 4
    torch.set_default_dtype(BF16)
    try:
        p = nn.Parameter(torch.zeros(5, device=backend.device))
        opt = backend.build(FlashAdamW, [p], lr=torch.tensor(1e-3))
        p.grad = torch.ones_like(p)
        opt.state_dict()
        opt.state[p]["step"].fill_(300 - steps)
        for _ in range(steps):
            opt.step()
        copied = copy.deepcopy(opt.state_dict())
        opt.load_state_dict(copied)
    finally:
        torch.set_default_dtype(FP32)
    assert opt.state[p]["step"].dtype == FP32
    assert float(opt.state[p]["step"]) == 300


def test_case_34_tied_weights_take_one_step(backend: BackendUnderTest):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 32)
            self.head = nn.Linear(32, 8, bias=False)
            self.head.weight = self.embedding.weight

    torch.manual_seed(0)
    model = Tied().to(BF16).to(backend.device)
    opt = backend.build(FlashAdamW, model.parameters(), lr=1e-2)
    out = model.head(model.embedding(torch.arange(4, device=backend.device)))
    out.float().square().mean().backward()
    alone = nn.Parameter(model.head.weight.detach().clone())
    alone.grad = model.head.weight.grad.clone()
    other = backend.build(FlashAdamW, [alone], lr=1e-2)
    opt.step()
    other.step()
    assert float(opt.state[model.head.weight]["step"]) == 1
    assert_same(opt, other)


def test_the_closure_is_called_with_gradients_enabled(backend: BackendUnderTest):
    p = nn.Parameter(torch.ones(2, 32, dtype=BF16, device=backend.device))
    opt = backend.build(FlashSGD, [p], lr=0.5)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = p.float().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert float(opt.step(closure)) == 64
    assert torch.equal(p, torch.full_like(p, 0.5))


def test_maximize_goes_the_other_way(backend: BackendUnderTest):
    p = nn.Parameter(torch.zeros(2, 32, dtype=BF16, device=backend.device))
    opt = backend.build(FlashSGD, [p], lr=0.5, maximize=True)
    p.grad = torch.ones_like(p)
    opt.step()
    assert torch.equal(p, torch.full_like(p, 0.5))


def test_decouple_lr_decays_by_the_ratio_of_the_lrs(backend: BackendUnderTest):
    p = nn.Parameter(torch.ones(2, 32, device=backend.device))
    opt = backend.build(FlashAdamW, [{"params": [p], "lr": 0.25}], weight_decay=0.5, decouple_lr=True)
    p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.equal(p, torch.full_like(p, 0.5))  # lr / initial lr == 1
    opt.param_groups[0]["lr"] = 0.125
    opt.step()
    assert torch.equal(p, torch.full_like(p, 0.375))  # 0.5 * (1 - 0.5 * 0.5)


def test_check_numerics_reports_a_weight_of_one_that_cannot_move(backend: BackendUnderTest):
    """Case 27: with 24 bits a relative change below about 2^-17 is lost; with 32 it is kept."""
    for master_bits, lost in ((24, True), (32, False)):
        p = nn.Parameter(torch.ones(2, 32, dtype=BF16, device=backend.device))
        opt = backend.build(FlashSGD, [p], lr=1e-6, master_weight_bits=master_bits, check_numerics=True)
        p.grad = torch.ones_like(p)
        if lost:
            with pytest.raises(flashdist.NumericsError, match=r"params.*\(2, 32\): 64 of 64.*master_weight_bits=32"):
                opt.step()
        else:
            opt.step()


def test_a_step_without_any_gradient_does_nothing(backend: BackendUnderTest):
    opt = backend.build(FlashAdamW, parameters([(2, 32)], device=backend.device))
    before = snapshot(opt)
    opt.step()
    assert_unchanged(opt, before)
    assert not opt.state


# Dynamo looks at .grad of what it resumes with.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_training_step_leaves_the_optimizer_out_of_its_graphs():
    """torch.compile breaks its graph at the optimizer's calls instead of tracing them, and the bits are the same."""

    def run(compile_with: Any) -> list[Tensor]:
        model = nn.Linear(64, 32, dtype=BF16)
        opt = FlashAdamW(model.parameters(), lr=1e-3)

        def train_step(x: Tensor) -> Tensor:
            loss = model(x).float().square().mean()
            loss.backward()
            opt.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
            return loss.detach() * 2

        if compile_with is not None:
            train_step = torch.compile(train_step, backend=compile_with)
        losses = []
        for t in range(3):
            opt.param_groups[0]["lr"] = 1e-3 / (t + 1)
            losses.append(train_step(torch.ones(8, 64, dtype=BF16)))
        return [*losses, *model.parameters()]

    graphs: list[set[str]] = []

    def record(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append({str(node.target) for node in module.graph.nodes if node.op.startswith("call")})
        return module

    torch.manual_seed(0)
    plain = run(None)
    torch.manual_seed(0)
    compiled = run(record)
    assert all(map(torch.equal, plain, compiled))
    assert len(graphs) == 2  # the forward pass, and what follows the optimizer
    assert "square" in graphs[0]
    assert graphs[1] == {"detach", "<built-in function mul>"}
