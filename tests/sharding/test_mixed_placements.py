"""Placements of parameters and gradients on a 2x2 mesh: what fits is stepped as by one process, the rest refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from flashdist import FlashAdamW, NumericsError
from tests.support.cases import normal
from tests.support.ranks import run_ranks

ROWS = [Shard(0), Replicate()]
WEIGHT, GRAD = normal((8, 64), seed=0, dtype=torch.bfloat16), normal((8, 64), seed=1, dtype=torch.bfloat16)


def refusal(action: Callable[[], Any]) -> str:
    """The message of the error that ``action`` raises."""
    try:
        action()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def same_master(opt: FlashAdamW, p: Tensor, other: FlashAdamW, q: Tensor) -> bool:
    return torch.equal(opt.master_weight(p).full_tensor(), other.master_weight(q))


def gradients(rank: int, world_size: int) -> dict[str, Any]:
    mesh, other_mesh = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    q = nn.Parameter(WEIGHT.clone())
    q.grad = GRAD.clone()
    expected = FlashAdamW([q], lr=0.1)
    norm = float(expected.clip_grad_norm_(1.0))
    expected.step()
    found: dict[str, Any] = {"norms": norm}
    summand = GRAD if rank == 0 else torch.zeros_like(GRAD)
    placed = {
        "the parameter's": distribute_tensor(GRAD, mesh, ROWS),
        "replicated": distribute_tensor(GRAD, mesh, [Replicate()] * 2),
        "other shards": distribute_tensor(GRAD, mesh, [Shard(1), Shard(0)]),
        "partial sums": DTensor.from_local(summand, mesh, [Partial(), Partial()], run_check=False),
    }
    for name, grad in placed.items():
        p = nn.Parameter(distribute_tensor(WEIGHT, mesh, ROWS))
        p.grad = grad
        opt = FlashAdamW([p], lr=0.1)
        close = abs(float(opt.clip_grad_norm_(1.0)) - norm) < 1e-5
        opt.step()
        found[name] = close and same_master(opt, p, expected, q)
    for name, grad in {
        "plain": GRAD.clone(),
        "of another mesh": distribute_tensor(GRAD, other_mesh, [Shard(0)]),
    }.items():
        p = nn.Parameter(distribute_tensor(WEIGHT, mesh, ROWS))
        p.grad = grad
        opt = FlashAdamW([p])
        found[name] = [refusal(opt.step), refusal(lambda opt=opt: opt.clip_grad_norm_(1.0))]
        assert torch.equal(p.detach().full_tensor(), WEIGHT)
        assert not opt.state
    q = nn.Parameter(WEIGHT.clone())
    q.grad = distribute_tensor(GRAD, mesh, ROWS)
    found["of a plain parameter"] = [refusal(FlashAdamW([q]).step)]
    return found


def test_gradients_are_placed_as_their_parameters():
    found = run_ranks(gradients, 4)[0]
    for name in ("the parameter's", "replicated", "other shards", "partial sums"):
        assert found[name] is True, name
    for name in ("plain", "of another mesh", "of a plain parameter"):
        for message in found[name]:
            assert message.startswith("RuntimeError: the gradient of parameter param_groups[0]"), (name, message)
            assert "distribute_tensor" in message


# Shape, mesh, placements, quantize: and the refusal's text, or None.
LAYOUTS: list[tuple[tuple[int, ...], tuple[int, ...], list[Any], bool, str | None]] = [
    ((8, 64), (2, 2), [Shard(0), Shard(1)], True, None),
    ((8, 128), (2, 2), [Shard(1), Shard(1)], True, None),
    ((8, 64), (2, 2), [Shard(1), Shard(1)], True, "cuts a group of 32"),  # each of the two alone would fit
    ((8, 64), (2, 2), [Shard(1), Shard(1)], False, None),
    ((8, 48), (4,), [Shard(1)], True, "cuts a group of 32"),
    ((8, 48), (4,), [Shard(0)], True, None),
    ((3, 8, 40), (4,), [Shard(1)], True, None),
    ((2, 5, 16), (2, 2), [Replicate(), Shard(2)], True, "cuts a group of 32"),  # the row is 5 x 16
    ((250,), (4,), [Shard(0)], True, None),
    ((8, 64), (2, 2), [Partial(), Shard(0)], True, "partial sum is no parameter"),
]


def layouts(rank: int, world_size: int) -> list[str | None]:
    found: list[str | None] = []
    for shape, mesh_shape, placements, quantize, _ in LAYOUTS:
        mesh = init_device_mesh("cpu", mesh_shape)
        weight, grad = normal(shape, seed=2, dtype=torch.bfloat16), normal(shape, seed=3, dtype=torch.bfloat16)
        start = [Replicate() if isinstance(x, Partial) else x for x in placements]
        p = nn.Parameter(distribute_tensor(weight, mesh, start))
        if start != placements:
            local = p.detach().to_local()
            p = nn.Parameter(
                DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=p.stride())
            )
        try:
            opt = FlashAdamW([p], lr=0.1, quantize=quantize)
        except ValueError as error:
            found.append(str(error))
            continue
        q = nn.Parameter(weight.clone())
        expected = FlashAdamW([q], lr=0.1, quantize=quantize)
        for _ in range(2):
            p.grad, q.grad = distribute_tensor(grad, mesh, placements), grad.clone()
            opt.step()
            expected.step()
        assert same_master(opt, p, expected, q)
        for key, value in expected.state[q].items():
            mine = opt.state[p][key]
            whole = mine.full_tensor() if isinstance(mine, DTensor) and mine.dtype != torch.int16 else None
            assert whole is None or torch.equal(whole, value), key
        found.append(None)
    return found


def test_a_shard_that_cuts_a_group_is_refused_and_no_other():
    for (shape, _, placements, _, text), found in zip(LAYOUTS, run_ranks(layouts, 4)[0], strict=True):
        assert (found is None) == (text is None), (shape, placements, found)
        assert text is None or (text in found and f"of shape {shape}" in found and "[0]" in found)


def load_quantized(rank: int, world_size: int) -> list[str]:
    """State of 8 bits brings its setting along: a shard that cuts a group must not get it."""
    q = nn.Parameter(WEIGHT.clone())
    saved = FlashAdamW([q]).state_dict()
    p = nn.Parameter(distribute_tensor(WEIGHT, init_device_mesh("cpu", (4,)), [Shard(1)]))
    opt = FlashAdamW([p], quantize=False)
    return [refusal(lambda: opt.load_state_dict(saved)), str(opt.param_groups[0]["quantize"]), str(len(opt.state))]


def test_a_state_dict_cannot_quantize_what_cuts_a_group():
    message, quantize, states = run_ranks(load_quantized, 4)[0]
    assert "cuts a group of 32" in message
    assert (quantize, states) == ("False", "0")


def lost_updates(rank: int, world_size: int) -> list[str]:
    """Only the last rank's rows lose their updates; whether all raise or none depends on the whole tensor."""
    found = []
    for lost_rows in (1, 6):
        weight, grad = torch.zeros(8, 64, dtype=torch.bfloat16), torch.ones(8, 64, dtype=torch.bfloat16)
        weight[-lost_rows:] = 1.0
        p = nn.Parameter(distribute_tensor(weight, init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)]))
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements)
        opt = FlashAdamW([p], lr=1e-6, weight_decay=0.0, check_numerics=True)
        try:
            opt.step()
            found.append("")
        except NumericsError as error:
            found.append(str(error))
    return found


def test_check_numerics_counts_over_the_ranks():
    ranks = run_ranks(lost_updates, 4)
    assert all(found == ranks[0] for found in ranks), "all ranks raise, or none does"
    assert ranks[0][0] == ""
    assert "384 of 512" in ranks[0][1]


def scaler_run(
    scaler_class: Any, placements: list[Any], unscale: bool, broken: bool, dtype: torch.dtype, meshes: list[Any]
) -> tuple[float, list[float]] | str:
    grads = [GRAD.to(dtype), GRAD.to(dtype).clone()]
    if broken:
        grads[1][-1, -1] = torch.inf  # on the last rank, and on its replicas
    params = []
    for grad, mesh, placement in zip(grads, meshes, placements, strict=True):
        p = nn.Parameter(distribute_tensor(WEIGHT.to(dtype), mesh, placement))
        p.grad = distribute_tensor(grad, mesh, placement)
        params.append(p)
    opt, scaler = FlashAdamW(params), scaler_class("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    before = [p.detach().full_tensor().clone() for p in params]
    try:
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
    except RuntimeError as error:
        assert all(torch.equal(p.detach().full_tensor(), b) for p, b in zip(params, before, strict=True))
        return str(error)
    scaler.update()
    moved = [float(not torch.equal(p.detach().full_tensor(), b)) for p, b in zip(params, before, strict=True)]
    return scaler.get_scale(), moved


def scalers(rank: int, world_size: int) -> dict[str, Any]:
    import warnings

    warnings.simplefilter("ignore")  # torch's own: it wraps the scaler's numbers in DTensors
    square, line = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), init_device_mesh("cpu", (4,))
    fp16, bf16, plain = torch.float16, torch.bfloat16, torch.amp.GradScaler
    fsdp, hsdp = [[Shard(0)]] * 2, [[Replicate(), Shard(0)]] * 2
    tp, two = [ROWS, [Shard(0), Shard(1)]], [square["dp"], square]
    return {
        "fsdp2": scaler_run(plain, fsdp, False, True, fp16, [line] * 2),
        "fsdp2, none": scaler_run(plain, fsdp, False, False, fp16, [line] * 2),
        "fsdp2, unscaled": scaler_run(plain, fsdp, True, True, bf16, [line] * 2),
        "fsdp2, sharded scaler": scaler_run(ShardedGradScaler, fsdp, True, True, fp16, [line] * 2),
        "hsdp": scaler_run(plain, hsdp, False, True, fp16, [square] * 2),
        "tp, sharded scaler": scaler_run(ShardedGradScaler, tp, True, True, fp16, [square] * 2),
        "tp, sharded scaler, none": scaler_run(ShardedGradScaler, tp, True, False, fp16, [square] * 2),
        "tp": scaler_run(plain, tp, False, True, fp16, [square] * 2),
        "tp, unscaled": scaler_run(plain, tp, True, True, bf16, [square] * 2),
        "two meshes": scaler_run(plain, [[Shard(0)], [Shard(0), Shard(1)]], False, False, fp16, two),
    }


def test_ranks_agree_on_an_overflow_or_the_scaler_is_refused():
    ranks = run_ranks(scalers, 4)
    assert all(found == ranks[0] for found in ranks), "no rank may step while another skips"
    found = ranks[0]
    for name in ("fsdp2", "fsdp2, unscaled", "fsdp2, sharded scaler", "hsdp", "tp, sharded scaler"):
        assert found[name] == (4.0, [0.0, 0.0]), name
    for name in ("fsdp2, none", "tp, sharded scaler, none"):
        assert found[name] == (8.0, [1.0, 1.0]), name
    for name in ("tp", "two meshes"):
        assert "call scaler.unscale_(optimizer)" in found[name]
    assert "some ranks have found an overflow" in found["tp, unscaled"]
