"""ZeRO-1: the same bits as one process, whatever happens to the parameters between steps."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flashdist
from flashdist import FlashAdamW, NumericsError
from flashdist.checkpoint.export import torch_state_dict
from flashdist.sharding.replicated import full_state_dict, shard_states
from flashdist.sharding.row_shard import RowShard
from tests.sharding.odd_parameters import named_parameters, param_groups, set_gradients
from tests.support.backends import BF16, BackendUnderTest, assert_same_bits
from tests.support.ranks import run_ranks

OPTIMIZERS = [
    ("FlashAdamW", {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1}),
    ("FlashLion", {"lr": 1e-3}),
    ("FlashSGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    ("FlashSGDW", {"lr": 1e-2}),
]


def build(cls, arguments, sharded, seed=0):
    named = named_parameters(seed)
    opt = getattr(flashdist, cls)(param_groups(named), **arguments)
    if sharded:
        shard_states(opt)
    return named, opt


def train(named, opt, steps, first=0, without=()):
    for t in range(first, first + steps):
        set_gradients(named, t, without)
        opt.clip_grad_norm_(0.5 if t % 2 else 1e9)
        opt.step()
        opt.zero_grad()


def assert_equal_runs(named, opt, ref_named, ref):
    """Weights on this rank, and all states after they were gathered, bit for bit."""
    for name, p in named.items():
        assert_same_bits(p.detach(), ref_named[name].detach(), f"weight {name}")
    ours, theirs = full_state_dict(opt), ref.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, state in theirs["state"].items():
        assert list(ours["state"][key]) == list(state)
        for entry, value in state.items():
            assert_same_bits(ours["state"][key][entry], value, f"{entry} of parameter {key}")


def in_triton(rank, ranks):
    """Rows start at any element of a weight; the kernels see views of it."""
    arguments = {"lr": 1e-2, "betas": (0.9, 0.999)}
    runs = []
    for sharded in (True, False):
        named = {n: p for n, p in named_parameters().items() if n in ("small", "wide", "experts", "last_channels")}
        backend = BackendUnderTest("triton", torch.device("cpu"))
        opt = backend.build(FlashAdamW, named.values(), **arguments)
        if sharded:
            shard_states(opt)
        train(named, opt, 2)
        runs += [named, opt]
    assert_equal_runs(*runs)


def test_the_triton_kernels_step_rows():
    run_ranks(in_triton, 3)


def equal_to_one_process(rank, ranks, cls, arguments):
    named, opt = build(cls, arguments, sharded=True)
    ref_named, ref = build(cls, arguments, sharded=False)
    for n, o in ((named, opt), (ref_named, ref)):
        train(n, o, 2)
        train(n, o, 1, first=2, without=("wide", "three", "experts"))
        n["frozen"].requires_grad_(True)
        n["embedding"].requires_grad_(False)
        train(n, o, 1, first=3)
        n["embedding"].requires_grad_(True)
        train(n, o, 1, first=4)
    assert_equal_runs(named, opt, ref_named, ref)
    for name in named:
        assert_same_bits(opt.master_weight(named[name]), ref.master_weight(ref_named[name]), f"master weight {name}")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_adamw_has_the_bits_of_one_process(ranks):
    run_ranks(equal_to_one_process, ranks, *OPTIMIZERS[0])


@pytest.mark.parametrize(("cls", "arguments"), OPTIMIZERS[1:], ids=[c for c, _ in OPTIMIZERS[1:]])
def test_other_rules_have_the_bits_of_one_process(cls, arguments):
    run_ranks(equal_to_one_process, 3, cls, arguments)


def pair(cls="FlashAdamW", **arguments):
    """The same parameters and optimizer twice: with sharded states, and without."""
    arguments = {"lr": 1e-2, **arguments}
    return (*build(cls, arguments, sharded=True), *build(cls, arguments, sharded=False))


def load_state(rank, ranks):
    named, opt, ref_named, ref = pair()
    train(ref_named, ref, 2)
    train(named, opt, 1, first=7)
    # A whole state, of another run, on another device's file.
    opt.load_state_dict(copy.deepcopy(ref.state_dict()))
    copy_weights(named, ref_named)
    for n, o in ((named, opt), (ref_named, ref)):
        train(n, o, 1, first=2)
    assert_equal_runs(named, opt, ref_named, ref)
    # The sharded state of the same cut, into a fresh optimizer; after it, the run goes on.
    saved = copy.deepcopy(opt.state_dict())
    assert isinstance(saved["state"][0]["exp_avg"], RowShard)
    other_named, other = build("FlashAdamW", {"lr": 1e-2}, sharded=True, seed=5)
    other.load_state_dict(saved)
    copy_weights(other_named, named)
    for n, o in ((other_named, other), (ref_named, ref)):
        train(n, o, 1, first=3)
    assert_equal_runs(other_named, other, ref_named, ref)
    # torch's dense state, whole: moments are encoded, on each rank its rows.
    adamw = torch.optim.AdamW(param_groups_of_torch(ref_named), lr=1e-2)
    adamw.load_state_dict(torch_state_dict(ref))
    for o in (other, ref):
        o.load_state_dict(adamw.state_dict())
    assert_equal_runs(other_named, other, ref_named, ref)
    exported = full_state_dict(other, torch_state_dict(other))
    for key, state in torch_state_dict(ref)["state"].items():
        for entry, value in state.items():
            assert_same_bits(exported["state"][key][entry], value, entry)


def param_groups_of_torch(named):
    return [{"params": group["params"]} for group in param_groups(named)]


@torch.no_grad()
def copy_weights(named, source):
    for name, p in named.items():
        p.copy_(source[name])


def test_whole_and_sharded_states_load():
    run_ranks(load_state, 2)
    run_ranks(load_state, 3)


def changed_between_steps(rank, ranks):
    named, opt, ref_named, ref = pair()
    for n, o in ((named, opt), (ref_named, ref)):
        train(n, o, 2)
        with torch.no_grad():
            n["wide"].mul_(0.5)  # its corrections are stale
            n["experts"][1, 3] = 0
            n["last_channels"].data = n["last_channels"].data * 2
        train(n, o, 1, first=2)
        n["wide"].data.mul_(2)
    for name in named:
        assert_same_bits(opt.master_weight(named[name]), ref.master_weight(ref_named[name]), name)
    assert_equal_runs(named, opt, ref_named, ref)
    # A copy has parameters of its own, and goes on alike.
    copied = copy.deepcopy(opt)
    params = [p for group in copied.param_groups for p in group["params"]]
    names = [name for group in param_groups({n: n for n in named}) for name in group["params"]]
    copied_named = dict(zip(names, params, strict=True))
    assert not {p.data_ptr() for p in params if p.numel()} & {p.data_ptr() for p in named.values() if p.numel()}
    train(copied_named, copied, 1, first=3)
    train(ref_named, ref, 1, first=3)
    assert_equal_runs(copied_named, copied, ref_named, ref)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(opt)


def test_changed_weights_and_copies():
    run_ranks(changed_between_steps, 3)


def numbers(rank, ranks):
    # A skipped step, as GradScaler asks for it, and its scale.
    named, opt, ref_named, ref = pair()
    for n, o in ((named, opt), (ref_named, ref)):
        train(n, o, 1)
        o.grad_scale, o.found_inf = torch.tensor(2.0), torch.tensor(1.0)
        train(n, o, 1, first=1)
        assert float(o.state[n["small"]]["step"]) == 1
        o.found_inf = torch.tensor(0.0)
        train(n, o, 1, first=2)
    assert_equal_runs(named, opt, ref_named, ref)
    assert_same_bits(opt.clip_grad_norm_(1.0), ref.clip_grad_norm_(1.0))
    # Lost updates are counted over all ranks, and all of them raise.
    p = nn.Parameter(torch.ones(40, 64, dtype=BF16))
    losing = FlashAdamW([p], lr=1e-6, weight_decay=0, check_numerics=True)
    shard_states(losing)
    p.grad = torch.zeros_like(p)
    p.grad[:25] = 1e-3
    with pytest.raises(NumericsError, match="1600 of 2560"):
        losing.step()
    p.grad[:] = 0
    p.grad[:15] = 1e-3
    losing.state.clear()
    losing.step()


def test_skipped_steps_and_lost_updates():
    run_ranks(numbers, 2)
    run_ranks(numbers, 3)


def refusals(rank, ranks):
    p = nn.Parameter(torch.zeros(40, 33, dtype=BF16))

    def fresh(*params):
        return FlashAdamW(params or [p])

    opt = fresh()
    opt.state_dict()
    with pytest.raises(
        RuntimeError, match=r"has states already.*right after its construction.*load the old one's state_dict"
    ):
        shard_states(opt)
    opt = fresh()
    shard_states(opt)
    with pytest.raises(RuntimeError, match="sharded already"):
        shard_states(opt)
    with pytest.raises(RuntimeError, match="takes no further param groups"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(opt.param_groups) == 1
    with pytest.raises(TypeError, match="takes an optimizer of flashdist, got AdamW"):
        shard_states(torch.optim.AdamW([p]))
    gaps = nn.Parameter(torch.zeros(40, 64, dtype=BF16)[:, :33])
    with pytest.raises(
        ValueError, match=r"param_groups\[0\]\['params'\]\[1\] of shape \(40, 33\) has the strides .*contiguous"
    ):
        shard_states(fresh(p, gaps))
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="not in the process group"):
            shard_states(fresh(), group)
    # What is wrong on one rank is raised on the other as well.
    alone = fresh()
    if rank == 1:
        alone.state_dict()
    with pytest.raises(
        RuntimeError, match="rank 1 of its group has a problem: .*has states" if rank == 0 else "^the opt"
    ):
        shard_states(alone)
    # A difference between ranks is named alike on all.
    odd = nn.Parameter(torch.zeros(5 + (rank == 1), 7))
    message = r"number 1: .*\(5, 7\).* on rank 0, .*\(6, 7\).* on rank 1"
    with pytest.raises(ValueError, match=message):
        shard_states(fresh(p, odd))
    with pytest.raises(ValueError, match=r"number 0: .*torch.bfloat16.* on rank 0, .*torch.float16.* on rank 1"):
        shard_states(fresh(nn.Parameter(torch.zeros(5, 40, dtype=torch.float16 if rank == 1 else BF16))))
    with pytest.raises(ValueError, match=r"number 1: .* on rank 0, no further parameter on rank 1"):
        shard_states(fresh(p) if rank == 1 else fresh(p, nn.Parameter(torch.zeros(3))))
    with pytest.raises(ValueError, match=r"state of 111 bytes.* on rank 0, .*state of 297 bytes.* on rank 1"):
        shard_states(FlashAdamW([p], quantize=rank != 1))


def test_refusals_at_the_call():
    run_ranks(refusals, 2)
    with pytest.raises(RuntimeError, match="init_process_group first"):
        shard_states(FlashAdamW([nn.Parameter(torch.zeros(3))]))


def refusals_in_a_step(rank, ranks):
    def new():
        named = named_parameters()
        opt = FlashAdamW(param_groups(named))
        shard_states(opt)
        return named, opt

    # Other weights, other gradients, another lr: on all ranks, and at once.
    named, opt = new()
    if rank == 1:
        named["wide"].data[3, 3] += 1
    with pytest.raises(ValueError, match=r"of shape \(51, 37\) \(and 0 more\) has other weights on another rank"):
        train(named, opt, 1)
    named, opt = new()
    train(named, opt, 1)
    with pytest.raises(RuntimeError, match=r"stepped different parameters, or with different hyperparameters"):
        train(named, opt, 1, without=("small",) if rank == 0 else ())
    named, opt = new()
    train(named, opt, 1)
    opt.param_groups[1]["lr"] = 1e-3 * (1 + rank)
    with pytest.raises(RuntimeError, match="lr and the like must be equal on all ranks"):
        train(named, opt, 1)
    # The rows lie elsewhere after a change of the memory format.
    named, opt = new()
    train(named, opt, 1)
    named["conv"].data = named["conv"].data.contiguous(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="Change the model's memory format before shard_states"):
        train(named, opt, 1)
    # A state that is cut for another number of ranks.
    named, opt = new()
    train(named, opt, 1)
    alone = dist.new_subgroups(1)[0]
    other = FlashAdamW(param_groups(named))
    shard_states(other, alone)
    before = full_state_dict(opt)
    with pytest.raises(ValueError, match="sharded differently from this optimizer's"):
        opt.load_state_dict(other.state_dict())
    after = full_state_dict(opt)
    for key, state in before["state"].items():
        for entry, value in state.items():
            assert_same_bits(after["state"][key][entry], value)


def test_refusals_in_a_step():
    run_ranks(refusals_in_a_step, 2)


def shard_like_a_tensor(rank, ranks):
    named, opt = build("FlashAdamW", {"lr": 1e-2}, sharded=True)
    train(named, opt, 1)
    shard = opt.state[named["experts"]]["exp_avg"]
    assert shard.shape == (3, 8, 40)
    assert shard.dtype == torch.int8
    assert shard.to_local().shape == (shard.rows.stop - shard.rows.start, 40)
    assert repr(shard).startswith("RowShard(rows ")
    clone = shard.detach().clone()
    assert_same_bits(clone.full_tensor(), shard.full_tensor())
    clone.zero_()
    assert shard.full_tensor().any()
    clone.copy_(shard)
    assert_same_bits(clone.to(torch.float32).full_tensor(), shard.full_tensor().float())
    assert torch.zeros_like(shard).full_tensor().shape == shard.shape
    for wrong in (lambda: shard + 1, lambda: shard.sum(), lambda: clone.copy_(torch.zeros(3, 8, 40)), lambda: shard[0]):
        with pytest.raises(NotImplementedError, match="holds some rows only"):
            wrong()
    with pytest.raises(NotImplementedError, match="holds some rows only"):
        shard.new_empty((3, 8, 41))
    # The way to lose two thirds of a run: if rank == 0: torch.save(opt.state_dict()).
    with pytest.raises(TypeError, match=r"holds rows .* of the 24 .* would lose the others.*full_state_dict"):
        torch.save(shard, io.BytesIO())
    with pytest.raises(TypeError, match="would lose the others"):
        torch.save(opt.state_dict(), io.BytesIO())


def test_a_row_shard_is_a_tensor_in_what_is_done_row_by_row():
    run_ranks(shard_like_a_tensor, 3)


def bytes_of_states(rank, ranks, cls, per_param):
    # 10.5 million parameters in matrices as in a language model, uneven over 3 ranks.
    shapes = [(5000, 1024), (1024, 1024), (333, 1024), (1024, 992), (992, 1024), (2048, 1024)]
    params = [nn.Parameter(torch.zeros(shape, dtype=BF16)) for shape in shapes]
    opt = getattr(flashdist, cls)(params, lr=1e-3)
    shard_states(opt)
    opt.state_dict()
    total = sum(p.numel() for p in params)
    summary = opt.memory_summary()
    states = summary.corrections + summary.moments + summary.scales
    assert abs(states / (total * per_param / ranks) - 1) < 0.03
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step()
    # Weights and gradients, the share of the states, and the buffer of the gathers.
    assert abs(opt.memory_summary().total / (total * (4 + per_param / ranks)) - 1) < 0.03
    return states


@pytest.mark.parametrize(("cls", "per_param"), [("FlashAdamW", 3.1875), ("FlashLion", 2.0625)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_has_its_share_of_the_states(cls, per_param, ranks):
    states = run_ranks(bytes_of_states, ranks, cls, per_param)
    assert max(states) - min(states) <= 2 * 1024 * per_param


def in_two_groups(rank, ranks):
    """Data-parallel groups beside each other, as with pipeline stages: other weights and shapes in each."""
    stage = rank // 2
    group = dist.new_subgroups(2)[0]
    shapes = [(40, 33), (7,)] if stage else [(3, 8, 40)]
    runs = []
    for sharded in (True, False):
        named = {str(i): nn.Parameter(torch.full(s, 0.5 + stage, dtype=BF16)) for i, s in enumerate(shapes)}
        opt = FlashAdamW(named.values(), lr=1e-2)
        if sharded:
            shard_states(opt, group)
        train(named, opt, 2 + stage)
        runs += [named, opt]
    assert_equal_runs(*runs)


def test_data_parallel_groups_beside_each_other():
    run_ranks(in_two_groups, 4)


def groups_of_all_kinds(rank, ranks):
    """Cases 8, 9, 11 and 16: groups that are frozen or empty, halves frozen for a while, a default dtype of bf16."""
    torch.set_default_dtype(BF16)
    try:
        runs = []
        for sharded in (True, False):
            shapes = {"frozen": (9, 33), "long": (1000,), "none": (0,), "wide": (51, 37), "small": (3,)}
            named = {n: nn.Parameter(torch.full(s, 0.5)) for n, s in shapes.items()}
            named["frozen"].requires_grad_(False)
            groups = [{"params": [named["frozen"]]}, {"params": []}, {"params": list(named.values())[1:], "lr": 1e-3}]
            opt = FlashAdamW(groups, lr=1e-2)
            if sharded:
                shard_states(opt)
            assert len(opt.state_dict()["state"]) == 4
            train(named, opt, 290)
            named["wide"].requires_grad_(False)
            train(named, opt, 1, first=290)
            whole = full_state_dict(opt)
            assert float(whole["state"][3]["step"]) == 290
            opt.load_state_dict(whole)
            named["wide"].requires_grad_(True)
            train(named, opt, 9, first=291)
            runs += [named, opt]
        assert_equal_runs(*runs)
        assert [float(runs[1].state[named["long"]]["step"]) for named in runs[:1]] == [300]
    finally:
        torch.set_default_dtype(torch.float32)


def test_frozen_and_empty_groups_and_long_runs():
    run_ranks(groups_of_all_kinds, 3)
