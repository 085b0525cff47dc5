"""launch/pretrain.py with parallel.strategy=deepspeed, on ranks of the process pool: as the other strategies, per ZeRO stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.pretraining import Outcome, overrides, refusal_in_pool, run_in_pool
from tests.support.ranks import run_ranks
from tests.support.tolerances import tolerance

CONFIGS = Path(__file__).parents[2] / "configs" / "deepspeed"
STAGES = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


def json_of(place: Path, stage: int) -> str:
    """The JSON that comes with the repository; it has none for stage 0."""
    if stage:
        return str(CONFIGS / f"zero{stage}.json")
    path = place / "zero0.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}))
    return str(path)


def settings(place: Path, stage: int) -> list[str]:
    return ["parallel.strategy=deepspeed", f"parallel.deepspeed_config={json_of(place, stage)}"]


def train(size: int, place: Path, name: str, *more: str, resume: str | None = None, terminate_in: int | None = None):
    arguments = overrides(place, f"run.folder={place / name}", *more)
    return run_ranks(run_in_pool, size, arguments, resume, terminate_in)


@pytest.fixture(scope="module")
def single(place) -> Outcome:
    return train(1, place, "single", "parallel.strategy=single")[0]


@pytest.fixture(scope="module")
def unbroken(place) -> dict[int, list[Outcome]]:
    return {stage: train(2, place, f"unbroken-{stage}", *settings(place, stage)) for stage in STAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_gives_the_losses_of_a_single_process(single, unbroken, stage):
    bound = tolerance("averaged gradients, training loss, relative")
    found = unbroken[stage][0]
    assert found.losses == pytest.approx(single.losses, rel=bound)
    assert set(found.losses) == set(range(1, 13))
    assert single.losses[12] < 0.9 * single.losses[1]
    held_out = [next(r["eval_loss"] for r in o.records if "eval_loss" in r) for o in (found, single)]
    assert held_out[0] == pytest.approx(held_out[1], rel=bound)
    norms = [[r["norm"] for r in o.records if "norm" in r] for o in (found, single)]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_are_shared_as_the_stage_says(unbroken, stage):
    found = unbroken[stage][0].records[-1]["bytes"]
    assert found["weights"] == pytest.approx(2 * found["parameters"] * (1 if stage == 3 else 2), rel=0.001)
    copies = 1 if stage else 2
    assert found["moments"] == pytest.approx(2 * copies * found["parameters"], rel=0.05)


@pytest.mark.parametrize("stage", STAGES)
def test_stopped_by_sigterm_and_resumed_is_the_unbroken_run(place, unbroken, stage):
    name = f"stopped-{stage}"
    stopped = train(2, place, name, *settings(place, stage), terminate_in=5)
    assert [outcome.last_step for outcome in stopped] == [5, 5]
    assert (place / name / "step-00000005").is_dir()
    resumed = train(2, place, name, *settings(place, stage), resume="auto")
    assert resumed[0].losses == unbroken[stage][0].losses
    assert set(resumed[0].samples) == set(range(6, 13))
    assert [p.name for p in sorted((place / name).glob("[su]*-*"))] == ["step-00000008", "step-00000012"]
