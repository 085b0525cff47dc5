"""torch's own routes: get_state_dict, dcp.save, dcp.load, set_state_dict, in every form, over changing ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.support.odd_model import step
from tests.support.ranks import run_ranks
from tests.support.resharding import (
    ALL,
    EQUAL,
    FLATTENED,
    FROM_RANK_0,
    FULL,
    NESTED,
    WAYS,
    Matrix,
    Side,
    load_worker,
    options,
    refusal,
    trained,
)

TORCH_WAYS = (NESTED, FLATTENED, FULL, FROM_RANK_0)
# Every strategy saves and loads, upwards and downwards; the whole matrix is slow.
COVERING: list[tuple[Side, Side]] = [
    (("single", 1), ("fsdp2", 3)), (("fsdp2", 3), ("hsdp", 4)), (("hsdp", 4), ("fsdp2_tp", 4)),
    (("fsdp2_tp", 4), ("ddp_zero1", 3)), (("ddp_zero1", 3), ("fsdp2", 2)), (("fsdp2", 2), ("single", 1)),
]  # fmt: skip


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("saved"))


def check(matrix: Matrix, source: Side, target: Side, ways: tuple[str, ...]) -> None:
    for way, outcome in matrix.outcome(source, target, ways).items():
        known = refusal(way, source, target)
        assert outcome == EQUAL or (known is not None and known[0] in outcome), f"{way}: {outcome}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("source", "target"), COVERING, ids=lambda side: f"{side[0]}{side[1]}")
def test_a_checkpoint_of_torch_s_loads_bit_for_bit(matrix: Matrix, source: Side, target: Side):
    check(matrix, source, target, TORCH_WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("target", ALL, ids=lambda side: f"{side[0]}{side[1]}")
@pytest.mark.parametrize("source", ALL, ids=lambda side: f"{side[0]}{side[1]}")
def test_the_whole_matrix(matrix: Matrix, source: Side, target: Side):
    check(matrix, source, target, WAYS)


def save_asynchronously(rank: int, world_size: int, path: str) -> None:
    """What is saved is what there was when async_save returned."""
    model, opt = trained("fsdp2", world_size, range(3))
    weights, states = get_state_dict(model, opt, options=options(NESTED))
    group = dist.new_group(backend="gloo")  # the thread that saves must not meet the model's collective calls
    saved = {"model": weights, "optim": states}
    saving = dcp.async_save(saved, checkpoint_id=f"{path}/{NESTED}", process_group=group)
    step(model, opt, 7)
    saving.result()


def test_case_6_async_save(tmp_path: Path):
    run_ranks(save_asynchronously, 2, str(tmp_path))
    (found,) = run_ranks(load_worker, 1, "single", str(tmp_path), (NESTED,))
    assert found == {NESTED: EQUAL}
