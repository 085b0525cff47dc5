"""What only a GPU can show: compiled kernels, graphs, no synchronisation, several devices, very large tensors."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashdist import FlashAdam, FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, FlashSGDW
from tests.support.backends import (
    BF16,
    FP16,
    FP32,
    BackendUnderTest,
    assert_same,
    assert_same_bits,
    parameters,
    set_gradients,
    train,
)
from tests.support.parity import assert_parity, twins
from tests.support.tolerances import tolerance

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LAB = BackendUnderTest("triton", CUDA)
SHAPES = [(), (0,), (1,), (33,), (6144,), (5, 7), (3, 33), (64, 3, 7, 7), (2, 1025), (33, 64), (130, 96), (256, 1024)]
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (FlashAdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw-nearest": (FlashAdamW, {"lr": 1e-2, "betas": (0.9, 0.8)}),
    "adam": (FlashAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "lion": (FlashLion, {"lr": 1e-3, "weight_decay": 0.1}),
    "sgd": (FlashSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd-plain": (FlashSGD, {"lr": 0.1}),
    "sgdw": (FlashSGDW, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "sgdw-plain": (FlashSGDW, {"lr": 0.1, "weight_decay": 0.01}),
}
every_rule = pytest.mark.parametrize("rule", RULES)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Any synchronisation with the host inside is an error."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gpu_optimizer(cls: Any = FlashAdamW, dtype: torch.dtype = BF16, **arguments: Any) -> FlashOptimizer:
    return cls(parameters(SHAPES, dtype, device=CUDA), **{"lr": 1e-2, **arguments})


def params_of(opt: FlashOptimizer) -> list[Tensor]:
    return [p for group in opt.param_groups for p in group["params"]]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@every_rule
def test_compiled_steps_against_eager(rule: str, dtype: torch.dtype):
    cls, arguments = RULES[rule]
    eager, triton = twins(LAB, cls, parameters(SHAPES, dtype), **arguments)
    for t in range(3):
        for opt in (eager, triton):
            set_gradients(params_of(opt), seed=t)
            opt.step()
        assert_parity(eager, triton)


@pytest.mark.parametrize(("master_bits", "quantize"), [(24, False), (32, True), (None, True), (None, False)])
def test_state_formats(master_bits: int | None, quantize: bool):
    eager, triton = twins(
        LAB, FlashAdamW, parameters(SHAPES), lr=1e-2, master_weight_bits=master_bits, quantize=quantize
    )
    for t in range(3):
        for opt in (eager, triton):
            set_gradients(params_of(opt), seed=t)
            opt.step()
        assert_parity(eager, triton)


@every_rule
def test_two_runs_are_equal_bit_for_bit(rule: str):
    cls, arguments = RULES[rule]
    runs = [gpu_optimizer(cls, **arguments) for _ in range(2)]
    for opt in runs:
        train(opt, 5)
    assert_same(*runs)


def test_a_long_run_stays_beside_the_eager_one():
    """200 steps on one device with nothing reloaded: the two drift apart by codes, not by steps."""
    eager, triton = twins(LAB, FlashAdamW, parameters([(64, 64), (100,)]), lr=1e-3, weight_decay=0.1)
    for t, opt in itertools.product(range(200), (eager, triton)):
        set_gradients(params_of(opt), seed=t)
        opt.step()
    for p, q in zip(params_of(eager), params_of(triton), strict=True):
        apart = (triton.master_weight(q).cpu() - eager.master_weight(p)).square().mean().sqrt()
        assert float(apart) < tolerance("compiled kernel, drift over 200 steps, lr") * 1e-3


def test_case_30_more_than_2_to_31_elements():
    n = 2**31 + 64
    if torch.cuda.mem_get_info()[0] < 8 * n:
        pytest.skip("needs 17 GiB of free GPU memory")
    p = nn.Parameter(torch.full((n // 64, 64), 0.5, dtype=BF16, device=CUDA))
    p.grad = torch.ones_like(p)
    edges = [slice(0, 1024), slice(-1024, None)]
    for i, edge in enumerate(edges):
        p.grad.view(-1)[edge] = torch.randn(1024, generator=torch.Generator().manual_seed(i)).to(BF16).to(CUDA)
    opt = FlashAdamW([p], lr=1e-2)
    opt.step()
    for edge in edges:
        small = nn.Parameter(torch.full((16, 64), 0.5, dtype=BF16, device=CUDA))
        small.grad = p.grad.view(-1)[edge].view(16, 64).clone()
        reference = FlashAdamW([small], lr=1e-2)
        reference.step()
        assert_same_bits(p.detach().view(-1)[edge], small.detach().view(-1), "weights")
        for key in ("error", "exp_avg", "exp_avg_sq"):
            assert_same_bits(opt.state[p][key].view(-1)[edge], reference.state[small][key].view(-1), key)
    middle = p.detach().view(-1)[n // 2 : n // 2 + 1024]
    assert (middle == middle[0]).all()
    assert (middle != 0.5).all()


def test_case_24_layers_on_two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    groups = [parameters([(33, 64), (5,)], device=f"cuda:{i}") for i in (0, 1)]
    opt = FlashAdamW(groups[0] + groups[1], lr=1e-2)
    for t in range(3):
        for g in groups:
            set_gradients(g, seed=t)
        opt.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
    for p, q in zip(*groups, strict=True):
        assert_same_bits(p, q, "the same weights and gradients on both devices")


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_step_does_not_synchronise(tensor_lr: bool):
    opt = gpu_optimizer(lr=torch.tensor(1e-2, device=CUDA) if tensor_lr else 1e-2)
    train(opt, 3)  # compile, allocate, upload
    params = params_of(opt)
    set_gradients(params, seed=0)
    with no_synchronisation():
        opt.step()
        opt.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
    for t in range(3):  # gradients at new addresses are uploaded without waiting, too
        set_gradients(params, seed=t)
        with no_synchronisation():
            opt.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)


def test_grad_scaler_does_not_synchronise_and_skips():
    opt = gpu_optimizer(dtype=FP16)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=1000)
    scaler.scale(torch.ones((), device=CUDA))  # creates the scale
    params = params_of(opt)
    for t in range(4):
        set_gradients(params, seed=t, scale=8.0)
        if t == 2:
            params[3].grad[0] = torch.inf
        if t == 0:
            scaler.step(opt)
            scaler.update()
            continue
        before = [p.detach().clone() for p in params]
        with no_synchronisation():
            scaler.step(opt)
            scaler.update()
        if t == 2:
            for p, old in zip(params, before, strict=True):
                assert_same_bits(p, old, "a skipped step")
    assert [float(opt.state[p]["step"]) for p in params] == [3.0] * len(params)
    assert scaler.get_scale() == 4.0


def test_a_captured_step_replays_with_a_moving_lr():
    """Every replay is a step: the count, the bias correction and the lr of that moment are read on the device."""

    def build() -> tuple[FlashOptimizer, Tensor]:
        lr = torch.tensor(1e-2, device=CUDA)
        return gpu_optimizer(lr=lr), lr

    (plain, plain_lr), (captured, captured_lr) = build(), build()
    for opt in (plain, captured):
        set_gradients(params_of(opt), seed=0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.step()  # warm-up: compiles and allocates
    torch.cuda.current_stream().wait_stream(stream)
    plain.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.clip_grad_norm_(5.0)
        captured.step()
    for t in range(1, 6):
        generator = torch.Generator().manual_seed(t)
        for p, q in zip(params_of(plain), params_of(captured), strict=True):
            value = torch.randn(p.shape, generator=generator).to(p.dtype).to(CUDA)
            p.grad.copy_(value)
            q.grad.copy_(value)
        for lr in (plain_lr, captured_lr):
            lr.fill_(1e-2 / t)
        plain.clip_grad_norm_(5.0)
        plain.step()
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, plain)
    # A step outside of the graph, with other gradients, leaves the graph's tables alone.
    for opt in (plain, captured):
        train(opt, 1, first=7)
    assert_same(captured, plain)


def test_a_captured_graph_outlives_other_steps():
    """Replay, step outside with gradients elsewhere, replay: the graph goes on reading its own gradients."""
    opts = [gpu_optimizer(lr=torch.tensor(1e-2, device=CUDA)) for _ in range(2)]
    static = []
    for opt in opts:
        set_gradients(params_of(opt), seed=0)
        opt.step()
        static.append([p.grad for p in params_of(opt)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opts[1].step()
    for _ in range(2):
        opts[0].step()
        graph.replay()
        for opt, grads in zip(opts, static, strict=True):
            set_gradients(params_of(opt), seed=3)
            opt.step()
            for p, g in zip(params_of(opt), grads, strict=True):
                p.grad = g
        torch.cuda.synchronize()
        assert_same(opts[1], opts[0])


@pytest.mark.filterwarnings("ignore::UserWarning")  # dynamo looks at every attribute, and torch warns of some
def test_a_compiled_training_step_is_not_recompiled_at_each_lr():
    import torch._dynamo

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(BF16).to(CUDA)
    opt = FlashAdamW(model.parameters(), lr=1e-2)
    compiles = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiles.append(graph)
        return graph.forward

    @torch.compile(backend=counting)
    def training_step(x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    x, y = torch.randn(16, 64, device=CUDA).to(BF16), torch.randn(16, 8, device=CUDA).to(BF16)
    losses, counts = [], []
    for t in range(8):
        opt.param_groups[0]["lr"] = 1e-2 / (1 + t)
        losses.append(float(training_step(x, y)))
        counts.append(len(compiles))
    assert counts[0] > 0
    assert counts[3] == counts[-1], f"compilations so far, step by step: {counts}"
    assert losses[-1] < losses[0]
    assert all(float(state["step"]) == 8 for state in opt.state.values())


def test_stepping_on_another_stream():
    plain, other = gpu_optimizer(), gpu_optimizer()
    train(plain, 3)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train(other, 3)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same(other, plain)


def test_state_moves_between_devices():
    """Case 10: a state dict mapped to the CPU or the GPU loads, and every tensor ends beside its parameter."""
    source = gpu_optimizer()
    train(source, 2)
    for where in ("cpu", "cuda"):
        saved = source.state_dict()
        moved = {i: {k: v.to(where) for k, v in state.items()} for i, state in saved["state"].items()}
        target = gpu_optimizer()
        target.load_state_dict({**saved, "state": moved})
        with torch.no_grad():
            for p, q in zip(params_of(target), params_of(source), strict=True):
                p.copy_(q)
        assert_same(target, source)
        assert all(v.device == p.device for p in params_of(target) for v in target.state[p].values())
        train(target, 1, first=2)
