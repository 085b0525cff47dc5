"""Gradient release on several ranks: FSDP2 steps the reduced shard, what cannot be right is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from flashdist import FlashAdamW, enable_gradient_release
from flashdist.sharding.replicated import shard_states
from tests.support.backends import bits
from tests.support.ranks import run_ranks


def build(sharded=True, reshard=True, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(37, 64), nn.Linear(64, 51), nn.Tanh(), nn.Linear(51, 7)).bfloat16()
    if sharded:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for part in (model[1], model[3], model):
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    return model, FlashAdamW(model.parameters(), lr=1e-2, **arguments)


def loss_of(model, seed):
    """Each rank has its own data."""
    rank = torch.distributed.get_rank()
    tokens = torch.randint(37, (6,), generator=torch.Generator().manual_seed(100 * rank + seed))
    return F.cross_entropy(model(tokens).float(), tokens % 7)


def local_state(opt):
    """Weights and state of this rank's shards."""
    found = []
    for p in opt._parameters():
        for t in (p.detach(), *opt.state[p].values()):
            found.append(getattr(t, "_local_tensor", t).clone())
    return found


def same(a, b):
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(local_state(a), local_state(b), strict=True))


def follows_step(rank, world_size, reshard, batch_elements):
    (model, opt), (twin, plain) = build(reshard=reshard), build(reshard=reshard)

    def vectors_wait_alone(p, grad):
        for place, batch in handle._pending.items():
            if place[2]:
                assert all(g.untyped_storage().nbytes() <= 2 * g.numel() * g.element_size() for g in batch.grads)

    with enable_gradient_release(model, opt, vectors_wait_alone, batch_elements=batch_elements) as handle:
        for t in range(3):
            loss_of(model, t).backward()
            assert all(p.grad is None for p in model.parameters())
            opt.step()
            loss_of(twin, t).backward()
            plain.step()
            plain.zero_grad()
    return same(opt, plain)


@pytest.mark.parametrize(
    ("world_size", "reshard", "batch_elements"), [(2, True, 1), (2, False, 1 << 20), (3, True, 1000)]
)
def test_fsdp2_has_the_bits_of_step(world_size, reshard, batch_elements):
    assert run_ranks(follows_step, world_size, reshard, batch_elements) == [True] * world_size


def accumulates_without_sync(rank, world_size):
    (model, opt), (twin, plain) = build(), build()
    enable_gradient_release(model, opt, batch_elements=1)
    for step in range(2):
        for m in (model, twin):
            for micro in range(3):
                m.set_requires_gradient_sync(micro == 2)
                loss_of(m, 3 * step + micro).backward()
        opt.step()
        plain.step()
        plain.zero_grad()
    return same(opt, plain)


def test_fsdp2_accumulates_where_only_the_last_backward_reduces():
    assert run_ranks(accumulates_without_sync, 2) == [True, True]


def second_backward(rank, world_size):
    model, opt = build()
    enable_gradient_release(model, opt)
    loss_of(model, 0).backward()
    before = local_state(opt)
    with pytest.raises(RuntimeError, match="second gradient before"):
        loss_of(model, 1).backward()
    unchanged = all(torch.equal(a, b) for a, b in zip(before, local_state(opt), strict=True))
    with pytest.raises(RuntimeError, match="previous_norm"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return unchanged


def test_fsdp2_two_micro_batches_and_clipping_are_errors():
    assert run_ranks(second_backward, 2) == [True, True]


def previous_norm(rank, world_size):
    (model, opt), (twin, plain) = build(), build()
    with enable_gradient_release(model, opt, clip="previous_norm", max_norm=0.1, batch_elements=1500) as handle:
        with handle.measure():
            loss_of(model, 0).backward()
        factor = handle._norm.factor
        for t in range(3):
            loss_of(model, t).backward()
            opt.step()
            loss_of(twin, t).backward()
            norm = plain.clip_grad_norm_(1e9)
            plain._clip_factor = factor
            plain.step()
            plain.zero_grad()
            torch.testing.assert_close(handle.last_norm, norm, rtol=1e-5, atol=0)
            factor = handle._norm.factor
            assert float(factor) < 1, "the case must clip"
    return same(opt, plain), float(handle.last_norm)


def test_fsdp2_clips_by_the_previous_norm_over_all_ranks():
    (same_0, norm_0), (same_1, norm_1) = run_ranks(previous_norm, 2)
    assert same_0
    assert same_1
    assert norm_0 == norm_1


def replicated(rank, world_size):
    model, opt = build(sharded=False)
    shard_states(opt)
    with pytest.raises(ValueError, match="shard_states"):
        enable_gradient_release(model, opt)
    opt = FlashAdamW(model.parameters())
    wrapped = DistributedDataParallel(model)
    with pytest.raises(ValueError, match="fully_shard"):
        enable_gradient_release(wrapped, opt)
    enable_gradient_release(model, opt)  # the wrapper cannot be seen from inside
    loss_of(wrapped, 0).backward()
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        opt.step()


def test_ddp_and_shard_states_are_refused():
    run_ranks(replicated, 2)


def unreduced(rank, world_size):
    torch.manual_seed(0)
    model = nn.Linear(64, 8).bfloat16()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), ignored_params={model.bias})
    with pytest.raises(ValueError, match="bias is not sharded, others are"):
        enable_gradient_release(model, FlashAdamW(model.parameters()))


def test_parameters_that_nobody_reduces_are_refused():
    run_ranks(unreduced, 2)
