"""Runs on several ranks, in the process pool: strategies agree, the data order goes on, SIGTERM is agreed on."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.pretraining import Outcome, overrides, refusal_in_pool, run_in_pool
from tests.support.ranks import run_ranks
from tests.support.tolerances import tolerance


def train(size: int, place: Path, name: str, *more: str, resume: str | None = None, terminate_in: int | None = None):
    arguments = overrides(place, f"run.folder={place / name}", *more)
    return run_ranks(run_in_pool, size, arguments, resume, terminate_in)


def global_samples(outcomes: list[Outcome], step: int, micro_batch: int = 2) -> list[int]:
    """A step's samples in the order in which the ranks took turns."""
    shares = [outcome.samples[step] for outcome in outcomes]
    turns = range(0, len(shares[0]), micro_batch)
    return [i for turn in turns for share in shares for i in share[turn : turn + micro_batch]]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def single(place) -> Outcome:
    return train(1, place, "single", "parallel.strategy=single", "train.steps=30", "run.save_every=0")[0]


@pytest.fixture(scope="module")
def unbroken(place) -> Callable[[str], list[Outcome]]:
    """Runs of 12 steps on 2 ranks by strategy, each made when it is first asked for."""

    @cache
    def of(strategy: str) -> list[Outcome]:
        return train(2, place, f"unbroken-{strategy}", f"parallel.strategy={strategy}", "run.save_every=0")

    return of


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, ["parallel.strategy=fsdp2"]),
        (2, ["parallel.strategy=fsdp2", "parallel.reduce_dtype=bf16", "parallel.reduce_every_micro_batch=true"]),
        (2, ["parallel.strategy=ddp"]),
        (2, ["parallel.strategy=ddp_zero1"]),
        (4, ["parallel.strategy=hsdp", "parallel.shard_ranks=2", "train.micro_batch=3"]),
    ],
    ids=lambda value: value[0].split("=")[1] if isinstance(value, list) else str(value),
)
def test_every_strategy_gives_the_losses_of_a_single_process(place, single, size, settings):
    name = f"{size}-{'-'.join(settings)}".replace("=", "-")
    outcomes = train(size, place, name, *settings, "train.steps=30", "run.save_every=0")
    bound = tolerance("averaged gradients, training loss, relative")
    assert outcomes[0].losses.keys() == single.losses.keys() == set(range(1, 31))
    for step, loss in single.losses.items():
        assert outcomes[0].losses[step] == pytest.approx(loss, rel=bound), step
    assert single.losses[30] < 0.9 * single.losses[1]
    held_out = [next(r["eval_loss"] for r in o.records if "eval_loss" in r) for o in (outcomes[0], single)]
    assert held_out[0] == pytest.approx(held_out[1], rel=bound)


def test_two_ranks_then_one_then_three_see_the_samples_of_an_unbroken_run(place, single):
    """And the learning rate goes on; the loss stays within the noise of averaging."""
    steps = "train.steps=30"
    two = train(2, place, "moving", steps, "run.stop_after=4")
    one = train(1, place, "moving", steps, "run.stop_after=8", "parallel.strategy=single", resume="auto")
    three = train(3, place, "moving", steps, "run.stop_after=12", resume="auto")
    for step in range(1, 13):
        outcomes = two if step <= 4 else one if step <= 8 else three
        assert global_samples(outcomes, step) == single.samples[step], step
    assert [len(outcomes[0].samples) for outcomes in (two, one, three)] == [4, 4, 4]
    rates = [{r["step"]: r["lr"] for r in o.records if "lr" in r} for o in (three[0], single)]
    assert rates[0] == {step: rate for step, rate in rates[1].items() if step <= 12}
    bound = tolerance("averaged gradients, training loss, relative")
    assert three[0].losses == pytest.approx({s: single.losses[s] for s in range(1, 13)}, rel=bound)


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp_zero1"])
def test_sigterm_on_one_rank_ends_all_and_the_resumed_run_is_the_unbroken_one(place, unbroken, strategy):
    settings = [f"parallel.strategy={strategy}", "run.save_every=0"]
    stopped = train(2, place, f"stopped-{strategy}", *settings, terminate_in=5)
    assert [outcome.last_step for outcome in stopped] == [5, 5]
    assert (place / f"stopped-{strategy}" / "step-00000005").is_dir()
    resumed = train(2, place, f"stopped-{strategy}", *settings, resume="auto")
    assert resumed[0].losses == unbroken(strategy)[0].losses
    assert set(resumed[0].samples) == set(range(6, 13))


def test_a_run_goes_on_under_another_strategy(place, single):
    first = train(2, place, "changing", "parallel.strategy=ddp_zero1", "run.stop_after=4")
    second = train(2, place, "changing", "parallel.strategy=fsdp2", resume="auto")
    assert [sorted(o[0].samples) for o in (first, second)] == [[1, 2, 3, 4], list(range(5, 13))]
    # The learning rate's end is another one than in the longer run, so only the first steps can be compared.
    assert second[0].losses[5] == pytest.approx(first[0].losses[4], rel=0.2)


def test_torch_adamw_is_sharded_saved_and_resumed_too(place):
    settings = ["optimizer.name=torch_adamw", "parallel.strategy=fsdp2"]
    unbroken = train(2, place, "torch-unbroken", *settings)
    train(2, place, "torch", *settings, "run.stop_after=6")
    resumed = train(2, place, "torch", *settings, resume="auto")
    assert resumed[0].losses == unbroken[0].losses
    kinds = unbroken[0].records[-1]["bytes"]
    assert kinds["weights"] == kinds["gradients"] == 4 * kinds["parameters"]
    assert kinds["moments"] == 8 * kinds["parameters"]


def test_states_are_shared_by_the_ranks_where_the_strategy_says_so(unbroken):
    """FSDP2 keeps everything once, ZeRO-1 the states once and the weights twice."""
    fsdp2, zero1 = (unbroken(strategy)[0].records[-1]["bytes"] for strategy in ("fsdp2", "ddp_zero1"))
    assert fsdp2["ranks"] == zero1["ranks"] == 2
    assert fsdp2["weights"] == 2 * fsdp2["parameters"]
    assert zero1["weights"] == 4 * zero1["parameters"]
    assert zero1["moments"] == fsdp2["moments"] == pytest.approx(2 * fsdp2["parameters"], rel=0.05)


def test_a_checkpoint_of_another_model_or_text_is_refused_on_all_ranks(place, unbroken):
    unbroken("fsdp2")
    checkpoint = str(place / "unbroken-fsdp2" / "step-00000012")
    for changes, message in (
        (["model.width=128"], "cannot resume from .*(64|128)"),
        (["train.seed=1"], "seed was 0 and is 1"),
        (["data.validation_share=3"], "text was .* must give the same tokens"),
    ):
        arguments = overrides(place, f"run.folder={place / 'other'}", *changes)
        said = run_ranks(refusal_in_pool, 2, arguments, checkpoint)
        assert len(set(said)) == 1
        assert re.search(message, said[0])
        assert "\n" not in said[0]
        assert not (place / "other").exists()
