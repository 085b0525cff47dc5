"""ZeRO-1: the same bits as one process, a share of the states, and clear refusals."""

from __future__ import annotations

import pytest

import flashdist
from flashdist.sharding.replicated import full_state_dict, shard_states
from tests.sharding.odd_parameters import named_parameters, param_groups, set_gradients
from tests.support.backends import assert_same_bits
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
