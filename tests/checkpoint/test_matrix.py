"""A checkpoint of one strategy and number of ranks, loaded under another: the same bits."""

from __future__ import annotations

import pytest

from flashdist import checkpoint
from tests.support.odd_model import STRATEGIES, build, digests, fill, make_optimizer, step
from tests.support.ranks import run_ranks

ALL = [(strategy, size) for strategy, sizes in STRATEGIES.items() for size in sizes]
# Every strategy saves and loads at least twice, every change of ranks upwards and downwards is there.
COVERING = [
    (("single", 1), ("fsdp2", 3)), (("fsdp2", 3), ("single", 1)), (("fsdp2", 2), ("fsdp2", 4)),
    (("fsdp2", 4), ("fsdp2", 3)), (("fsdp2", 4), ("hsdp", 4)), (("hsdp", 4), ("fsdp2_tp", 4)),
    (("fsdp2_tp", 4), ("fsdp2", 3)), (("fsdp2_tp", 4), ("single", 1)), (("hsdp", 4), ("ddp_zero1", 3)),
    (("ddp_zero1", 3), ("fsdp2", 2)), (("ddp_zero1", 3), ("ddp", 2)), (("ddp", 2), ("ddp_zero1", 3)),
    (("ddp", 2), ("fsdp2_tp", 4)), (("fsdp2", 2), ("fsdp2", 2)), (("single", 1), ("single", 1)),
]  # fmt: skip


def save_worker(rank, world_size, strategy, path):
    model = build(strategy, world_size)
    opt = make_optimizer(model, strategy)
    fill(model, 0)
    for seed in range(3):
        step(model, opt, seed)
    checkpoint.save(path, model, opt, extra={"step": 3})
    saved = digests(model, opt)
    step(model, opt, 7)
    return saved, digests(model, opt)


def load_worker(rank, world_size, strategy, path):
    model = build(strategy, world_size)
    opt = make_optimizer(model, strategy)
    fill(model, 99)
    step(model, opt, 99)
    before = digests(model, opt)
    assert checkpoint.load(path, model, opt) == {"step": 3}
    after = digests(model, opt)
    step(model, opt, 7)
    return before, after, digests(model, opt)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}

    def get(strategy, size):
        if (strategy, size) not in made:
            path = tmp_path_factory.mktemp("saved") / "checkpoint"
            answers = run_ranks(save_worker, size, strategy, str(path))
            assert all(answer == answers[0] for answer in answers)
            made[strategy, size] = (path, *answers[0])
        return made[strategy, size]

    return get


def check(saved, source, target):
    path, expected, expected_next = saved(*source)
    for before, after, after_next in run_ranks(load_worker, target[1], target[0], str(path)):
        assert before.keys() <= expected.keys()
        # What cannot differ: nothing is stored of an empty tensor, steps count alike, and a frozen one has no state.
        assert [n for n in before if before[n] == expected[n] and before[n][1] != (0,) and ".step" not in n] == []
        assert after == expected
        assert after_next == expected_next


@pytest.mark.parametrize(("source", "target"), COVERING, ids=lambda side: f"{side[0]}{side[1]}")
def test_a_checkpoint_loads_under_another_strategy_bit_for_bit(saved, source, target):
    check(saved, source, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", ALL, ids=lambda side: f"{side[0]}{side[1]}")
@pytest.mark.parametrize("source", ALL, ids=lambda side: f"{side[0]}{side[1]}")
def test_the_whole_matrix(saved, source, target):
    check(saved, source, target)
