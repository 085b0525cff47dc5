"""Saving and loading by several ranks: errors reach all of them, conversions and exports work on shards."""

from __future__ import annotations

import os
import signal
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from flashdist import FlashAdamW, checkpoint
from flashdist.checkpoint import folder, saving
from tests.support.odd_model import build, digests, fill, make_optimizer, step, tensors_of, whole
from tests.support.ranks import RankError, run_ranks


def trained(strategy, world_size, seed=0, steps=2, **settings):
    model = build(strategy, world_size)
    opt = make_optimizer(model, strategy, **settings)
    fill(model, seed)
    for i in range(steps):
        step(model, opt, i)
    opt.state_dict()  # allocates the state of what has had no gradient, as a save does
    return model, opt


def message(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def async_worker(rank, world_size, path):
    model, opt = trained("fsdp2", world_size)
    expected = digests(model, opt)
    handle = checkpoint.async_save(path, model, opt, extra=[1])
    step(model, opt, 5)
    dist.barrier()  # training's own collectives go on beside the saving thread's
    handle.result()
    other, other_opt = trained("fsdp2", world_size, seed=9)
    assert checkpoint.load(path, other, other_opt) == [1]
    assert digests(other, other_opt) == expected
    second = checkpoint.async_save(path, model, opt, overwrite=True)
    second.result()
    checkpoint.load(path, other, other_opt)
    assert digests(other, other_opt) == digests(model, opt)


def test_async_save_on_ranks(tmp_path):
    run_ranks(async_worker, 2, str(tmp_path / "c"))
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors",
    ]  # fmt: skip


def errors_worker(rank, world_size, path):
    model, opt = trained("fsdp2", world_size)
    checkpoint.save(path, model, opt)
    found = [message(checkpoint.save, path, model, opt)]
    found.append(message(checkpoint.save, path + "2", model, opt, extra={"mine": rank}))
    found.append(message(checkpoint.save, path + "2", model, opt, extra={"mine": object()} if rank == 1 else None))
    opt.param_groups[0]["lr"] = 0.1 + rank
    found.append(message(checkpoint.save, path + "2", model, opt))
    opt.param_groups[0]["lr"] = 0.1
    if rank == 1:
        with open(path + "/rank-00001.safetensors", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x99")
    dist.barrier()
    before = digests(model, opt)
    found.append(message(checkpoint.load, path, model, opt))
    assert digests(model, opt) == before
    return found


def test_what_one_rank_finds_wrong_is_raised_on_all(tmp_path):
    first, second = run_ranks(errors_worker, 2, str(tmp_path / "c"))
    kinds = ["FileExistsError", "ValueError", "TypeError", "ValueError", "CheckpointError"]
    assert [kind for kind, _ in first] == [kind for kind, _ in second] == kinds
    assert "different param groups" in second[1][1]
    assert "on rank 1: extra.mine" in first[2][1]
    assert "rank-00001.safetensors is damaged" in first[4][1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def paths_worker(rank, world_size, path):
    """Rank 1 gives another path, where a killed save has left its folder."""
    model, opt = trained("fsdp2", world_size)
    mine = f"{path}-{rank}"
    found = [message(checkpoint.save, mine, model, opt)]
    found.append(message(checkpoint.async_save, mine, model, opt))
    found.append(message(checkpoint.export_weights, mine + ".safetensors", model, opt))
    found.append(message(checkpoint.load, mine, model, opt))
    # The same path, but on a disk of its own.
    patched = {"saving_folder": lambda p: p.with_name("elsewhere" if rank else p.name + ".saving"), "_PATIENCE": 0.1}
    with patch.multiple(folder, **patched), patch.object(saving, "saving_folder", patched["saving_folder"]):
        found.append(message(checkpoint.save, path, model, opt))
    return found


def test_ranks_that_do_not_save_to_one_folder_publish_nothing(tmp_path):
    for left in ("c-1.saving", "elsewhere"):
        (tmp_path / left).mkdir()
        (tmp_path / left / ".lock").write_bytes(b"of a save that was killed")
    first, second = run_ranks(paths_worker, 2, str(tmp_path / "c"))
    for given in (first, second):
        assert [kind for kind, _ in given] == ["ValueError"] * 4 + ["CheckpointError"]
        for _, text in given[:4]:
            assert "ranks 0 and 1 give different paths" in text
            assert f"{tmp_path}/c-0" in text
            assert f"{tmp_path}/c-1" in text
        assert "does not see the folder" in given[4][1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c-1.saving", "elsewhere"]
    assert [p.name for left in tmp_path.iterdir() for p in left.iterdir()] == [".lock", ".lock"]


def diverged_worker(rank, world_size, strategy, path):
    model, opt = trained(strategy, world_size)
    if rank == world_size - 1:
        with torch.no_grad():
            p = next(iter(getattr(model, "module", model).wide.parameters()))
            (p.to_local() if hasattr(p, "to_local") else p).view(-1)[3] += 1
    return message(checkpoint.save, path, model, opt)


@pytest.mark.parametrize(("strategy", "size"), [("ddp", 2), ("hsdp", 4)])
def test_replicas_that_have_diverged_are_not_mixed(tmp_path, strategy, size):
    for kind, text in run_ranks(diverged_worker, size, strategy, str(tmp_path / "c")):
        assert kind == "ValueError"
        assert "model.wide.weight" in text
    assert list(tmp_path.iterdir()) == []


def conversions_worker(rank, world_size, strategy, path):
    model, opt = trained(strategy, world_size, master_weight_bits=32)
    masters = {n: whole(opt.master_weight(p)) for n, p in bare(model).named_parameters() if p.requires_grad}
    checkpoint.save(path, model, opt)
    for bits, quantize in ((24, True), (None, False), (32, False)):
        other, other_opt = trained(strategy, world_size, seed=9, master_weight_bits=bits, quantize=quantize)
        checkpoint.load(path, other, other_opt)
        bound = {24: 2.0**-16, None: 2.0**-8, 32: 0.0}[bits]
        for name, p in bare(other).named_parameters():
            if p.requires_grad:
                new = whole(other_opt.master_weight(p))
                assert ((new - masters[name]).abs() <= masters[name].abs() * bound).all(), (bits, name)
        step(other, other_opt, 3)
        checkpoint.save(path + f"-{bits}", other, other_opt)
        back, back_opt = trained(strategy, world_size, seed=8, master_weight_bits=bits, quantize=True)
        checkpoint.load(path + f"-{bits}", back, back_opt)
        step(back, back_opt, 4)
    return digests(back, back_opt)


def bare(model):
    return getattr(model, "module", model)


@pytest.mark.parametrize("strategy", ["fsdp2"])
def test_conversions_of_shards_equal_those_of_whole_tensors(tmp_path, strategy):
    alone = run_ranks(conversions_worker, 1, "single", str(tmp_path / "a"))[0]
    for found in run_ranks(conversions_worker, 2, strategy, str(tmp_path / "b")):
        assert found == alone


def export_worker(rank, world_size, strategy, folder):
    model, opt = trained(strategy, world_size)
    checkpoint.export_weights(folder + "/w.safetensors", model, opt)
    return {n: whole(opt.master_weight(p)).clone() for n, p in bare(model).named_parameters()}


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_export_gathers_shards(tmp_path, strategy):
    masters = run_ranks(export_worker, 2, strategy, str(tmp_path))[0]
    found = load_file(tmp_path / "w.safetensors")
    assert {name for name in found if "norm." not in name or name.endswith(("weight", "bias"))} == set(masters)
    assert all(torch.equal(found[name], master) for name, master in masters.items())


# Real training: resuming equals the unbroken run.


def net(world_size, sharded):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(37, 51), nn.Tanh(), nn.Linear(51, 40), nn.Tanh(), nn.Linear(40, 3)).to(
        torch.bfloat16
    )
    if sharded:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    opt = FlashAdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    return model, opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 30)


def run(model, opt, scheduler, rank, first, last):
    losses = []
    for i in range(first, last):
        generator = torch.Generator().manual_seed(100 * i + rank)
        x = torch.randn(8, 37, generator=generator).to(torch.bfloat16)
        loss = model(x).float().square().mean()
        loss.backward()
        opt.clip_grad_norm_(0.05)
        opt.step()
        scheduler.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def resume_worker(rank, world_size, path):
    unbroken = net(world_size, True)
    whole_run = run(*unbroken, rank, 0, 25)
    first = net(world_size, True)
    run(*first, rank, 0, 20)
    checkpoint.save(path, first[0], first[1], scheduler=first[2], extra={"step": 20})
    second = net(world_size, True)
    extra = checkpoint.load(path, second[0], second[1], scheduler=second[2])
    assert run(*second, rank, extra["step"], 25) == whole_run[20:]
    for model, opt, _ in (unbroken, second):
        for p in model.parameters():
            assert opt.state[p]["step"] == 25
    assert digests_of(unbroken) == digests_of(second)


def digests_of(trio):
    return digests(trio[0], trio[1])


def test_case_1_resuming_under_fsdp2_equals_the_unbroken_run(tmp_path):
    run_ranks(resume_worker, 2, str(tmp_path / "c"))


# Killed ranks.


def killed_worker(rank, world_size, path, victim, delay):
    model, opt = trained("fsdp2", world_size)
    checkpoint.save(path, model, opt, extra=0)
    dist.barrier()
    if rank in victim:
        # An alarm kills the process by itself, at whatever instruction it is.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-4))
    deadline = time.monotonic() + 20
    i = 0
    while time.monotonic() < deadline:
        i += 1
        checkpoint.save(path, model, opt, extra=i, overwrite=True)


def still_there_worker(rank, world_size, path):
    model, opt = trained("fsdp2", world_size, seed=9)
    expected = digests(*trained("fsdp2", world_size))
    extra = checkpoint.load(path, model, opt)
    assert digests(model, opt) == expected
    checkpoint.save(path, model, opt, extra=extra, overwrite=True)
    return extra


def kill_and_look(path, victim, delay):
    with pytest.raises(RankError):
        run_ranks(killed_worker, 2, path, victim, delay, timeout=60)
    extra = run_ranks(still_there_worker, 2, path)
    assert extra[0] >= 0


@pytest.mark.parametrize("victim", [(0,), (1,)])
def test_a_rank_killed_while_saving(tmp_path, victim):
    kill_and_look(str(tmp_path / "c"), victim, 0.05)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("instant", range(17))
def test_ranks_killed_at_many_instants(tmp_path, victim, instant):
    kill_and_look(str(tmp_path / "c"), victim, 0.013 * (instant + 1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def sharded_extra_worker(rank, world_size, path):
    model, opt = trained("fsdp2", world_size)
    masters = {n: opt.master_weight(p) for n, p in model.named_parameters() if p.requires_grad}
    checkpoint.save(path, model, opt, extra={"average": masters})
    found = checkpoint.load(path, model, opt)["average"]
    assert found.keys() == masters.keys()
    assert all(torch.equal(found[n], whole(t)) for n, t in masters.items())


def test_sharded_tensors_in_extra_come_back_whole(tmp_path):
    run_ranks(sharded_extra_worker, 2, str(tmp_path / "c"))


def evaluated_worker(rank, world_size, path):
    model, opt, scheduler = net(world_size, True)
    run(model, opt, scheduler, rank, 0, 2)
    with torch.no_grad():
        model(torch.ones(2, 37, dtype=torch.bfloat16))
    checkpoint.save(path, model, opt)
    with torch.no_grad():
        model(torch.ones(2, 37, dtype=torch.bfloat16))
    checkpoint.load(path, model, opt)
    run(model, opt, scheduler, rank, 2, 3)


def test_a_model_that_was_just_evaluated_is_saved_as_its_shards(tmp_path):
    """After a forward without a backward FSDP2's root holds whole weights."""
    run_ranks(evaluated_worker, 2, str(tmp_path / "c"))
    assert checkpoint.verify(tmp_path / "c").strategy == "fsdp2"


def names_worker(rank, world_size, path):
    model, opt = trained("fsdp2", world_size)
    checkpoint.save(path, model, opt)
    return sorted(tensors_of(model, opt))


def test_case_17_every_rank_has_the_same_entries(tmp_path):
    first, *others = run_ranks(names_worker, 4, str(tmp_path / "c"))
    assert all(other == first for other in others)
    assert checkpoint.verify(tmp_path / "c").strategy == "fsdp2"
