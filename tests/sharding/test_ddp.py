"""ZeRO-1 under DistributedDataParallel: real training, with all that DDP lets one do between two steps."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from flashdist import FlashAdamW, cast_model
from flashdist.sharding.replicated import full_state_dict, shard_states
from tests.support.backends import assert_same_bits
from tests.support.ranks import run_ranks


class Net(nn.Module):
    """Image-like input; one layer is used for some batches only, one parameter never, one is frozen, two are tied."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 40, 3, padding=1)
        self.norm = nn.BatchNorm2d(40)
        self.hidden = nn.Linear(40, 36)
        self.sometimes = nn.Linear(36, 36)
        self.head = nn.Linear(36, 40, bias=False)
        self.tied = nn.Linear(36, 40, bias=False)
        self.tied.weight = self.head.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.never = nn.Parameter(torch.ones(5, 33))
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        cast_model(self)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x, extra=False):
        dtype = self.hidden.weight.dtype
        h = torch.relu(self.norm(self.conv(x.to(dtype)).float())).mean(dim=(2, 3)).to(dtype)
        h = torch.relu(self.hidden(self.frozen(h)))
        if extra:
            h = h + self.sometimes(h)
        return (self.head(h) * self.scale + self.tied(h)).float()


def batch(step, size):
    g = torch.Generator().manual_seed(step)
    return torch.randn(size, 3, 6, 6, generator=g), torch.randint(40, (size,), generator=g)


def loss_of(model, step, rank, ranks, extra=False, size=12):
    x, y = batch(step, size)
    mine = slice(rank * size // ranks, (rank + 1) * size // ranks)
    return nn.functional.cross_entropy(model(x[mine], extra), y[mine])


def wrapped(zero, **arguments):
    model = DistributedDataParallel(
        Net(), gradient_as_bucket_view=True, find_unused_parameters=True, init_sync=True, **arguments
    )
    opt = FlashAdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    if zero:
        shard_states(opt, model=model)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 / (1 + t))
    return model, opt, schedule


def trained(zero, rank, ranks):
    model, opt, schedule = wrapped(zero)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for step in range(8):
        opt.zero_grad()
        if step % 2:  # gradients of two batches
            with model.no_sync():
                scaler.scale(loss_of(model, 100 + step, rank, ranks)).backward()
        # One rank uses a layer that the others do not; at times nobody does.
        loss = loss_of(model, step, rank, ranks, extra=rank == 1 and step < 5)
        scaler.scale(loss).backward()
        if step == 3 and rank == 1:
            # What one rank sees in a gradient before the average, all have after it: like an overflow.
            model.module.hidden.weight.grad.view(-1)[0] = float("inf")
        if step == 3:
            dist.all_reduce(model.module.hidden.weight.grad)
        opt.clip_grad_norm_(0.5)
        scaler.step(opt)
        scaler.update()
        schedule.step()
        losses.append(float(loss.detach()))
    return model, opt, losses


def equals_ddp(rank, ranks):
    model, opt, losses = trained(True, rank, ranks)
    ref_model, ref, ref_losses = trained(False, rank, ranks)
    assert losses == ref_losses
    for (name, p), q in zip(model.state_dict().items(), ref_model.state_dict().values(), strict=True):
        assert_same_bits(p, q, name)
    ours, theirs = full_state_dict(opt), ref.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, state in theirs["state"].items():
        for entry, value in state.items():
            assert_same_bits(ours["state"][key][entry], value, f"{entry} of {key}")
    steps = [float(state["step"]) for state in theirs["state"].values()]
    # The overflow was skipped; the layer of rank 1 had gradients in steps 0 to 4; one parameter never.
    assert sorted(set(steps)) == [0.0, 4.0, 7.0]
    return losses


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_has_the_bits_of_ddp_without_it(ranks):
    run_ranks(equals_ddp, ranks)


def loss_after(rank, ranks, steps):
    if ranks == 1:
        model = Net()
        opt = FlashAdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    else:
        model, opt, _ = wrapped(True)
    losses = []
    for step in range(steps):
        opt.zero_grad()
        loss = loss_of(model, step % 3, rank, ranks, size=24)
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return (mean / ranks).tolist()


def test_training_follows_one_process_with_the_same_global_batch():
    """Batch norms see smaller batches and averages are rounded to bf16, so the losses only come close."""
    one, three = run_ranks(loss_after, 1, 40)[0], run_ranks(loss_after, 3, 40)[0]
    assert one[-1] < one[0] - 0.5
    torch.testing.assert_close(torch.tensor(three[0]), torch.tensor(one[0]), rtol=0, atol=0.05)
    torch.testing.assert_close(torch.tensor(three[-1]), torch.tensor(one[-1]), rtol=0, atol=0.25)


def settings_of_ddp(rank, ranks):
    net = Net()
    opt = FlashAdamW(net.parameters())
    with pytest.warns(UserWarning, match="gradient_as_bucket_view=True"):
        shard_states(opt, model=DistributedDataParallel(net))
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    groups = [dist.new_group([r]) for r in range(ranks)]
    with pytest.raises(ValueError, match="give shard_states the group over which gradients are averaged"):
        shard_states(FlashAdamW(model.parameters()), groups[rank], model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard_states(FlashAdamW(model.parameters()), model=model)
        shard_states(FlashAdamW(model.parameters()), dist.group.WORLD, model=model)


def join(rank, ranks):
    def steps(model, opt, count):
        for step in range(count):
            opt.zero_grad()
            loss_of(model, step, rank, ranks).backward()
            opt.step()

    model, opt, _ = wrapped(True)
    with pytest.raises(RuntimeError, match=r"join\(\).*equally many batches"), model.join():
        steps(model, opt, 1)
    model, opt, _ = wrapped(True)
    with pytest.raises(RuntimeError, match="exhausted"), model.join(throw_on_early_termination=True):
        steps(model, opt, 2 + rank)
    assert float(opt.state[model.module.scale]["step"]) == 2


def dtensors(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    sharded = nn.Parameter(distribute_tensor(torch.zeros(4, 32), mesh))
    plain = nn.Parameter(torch.zeros(4, 32))
    with pytest.raises(ValueError, match=r"\['params'\]\[0\].* and all others are DTensors.*leave out shard_states"):
        shard_states(FlashAdamW([sharded]))
    with pytest.raises(ValueError, match=r"\['params'\]\[1\].*is a DTensor \(1 of 2 parameters are\).*sharded already"):
        shard_states(FlashAdamW([plain, sharded]))


def test_settings_of_ddp():
    run_ranks(settings_of_ddp, 2)


def test_join_is_refused_unless_it_stops_all_ranks():
    run_ranks(join, 2)


def test_parameters_that_are_sharded_already_are_refused():
    run_ranks(dtensors, 2)
