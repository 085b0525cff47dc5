"""Weights changed behind the optimizer are never joined with the corrections of the weights before."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flashdist import FlashAdamW, FlashOptimizer
from flashdist.numerics.companding import GROUP
from flashdist.numerics.fingerprint import TILE_GROUPS, num_tiles
from tests.support.backends import (
    BF16,
    FP16,
    BackendUnderTest,
    assert_same,
    assert_same_bits,
    parameters,
    set_gradients,
    train,
)

# Several tiles, the last one partial, over rows that end in a partial group: 5 rows of 22 groups.
SHAPE = (5, 700)
GROUPS_PER_ROW = 22
TILES = num_tiles(5 * GROUPS_PER_ROW)


def load_model(p: Tensor) -> None:
    model = nn.Module()
    model.weight = p
    model.load_state_dict({"weight": p.detach() * 0.5})


def ema_swap(p: Tensor) -> None:
    with torch.no_grad():
        average = p * 0.75
        kept = p.clone()
        p.copy_(average)
        average.copy_(kept)


def mask(p: Tensor) -> None:
    p.data.mul_((torch.arange(p.numel(), device=p.device) % 2).view(p.shape).to(p.dtype))


def other_data(p: Tensor) -> None:
    p.data = p.data * 2


def broadcast(p: Tensor) -> None:
    # What dist.broadcast and dcp.load do: a copy into the storage that autograd does not see.
    p.detach().copy_(torch.full_like(p, 0.125))


def swap_two_elements(p: Tensor) -> None:
    for tile in range(TILES):
        i = first_element(tile)
        flat = p.data.view(-1)
        flat[[i, i + 1]] = flat[[i + 1, i]]


WHOLE: list[Callable[[Tensor], None]] = [load_model, ema_swap, mask, other_data, broadcast, swap_two_elements]


def tile_of_each_element(device: torch.device) -> Tensor:
    """Which tile (a row has 22 groups, the last of them partial) each element lies in."""
    row, column = torch.meshgrid(torch.arange(SHAPE[0]), torch.arange(SHAPE[1]), indexing="ij")
    return ((row * GROUPS_PER_ROW + column // GROUP) // TILE_GROUPS).to(device)


def first_element(tile: int) -> int:
    return int((tile_of_each_element(torch.device("cpu")).view(-1) == tile).nonzero()[0])


def trained(lab: BackendUnderTest, dtype: torch.dtype = BF16, shape: tuple[int, ...] = SHAPE) -> FlashOptimizer:
    params = parameters([shape], dtype, device=lab.device)
    opt = lab.build(FlashAdamW, params, lr=1e-2)
    train(opt, 1)
    assert opt.state[params[0]]["error"].any()
    return opt


def the_only(opt: FlashOptimizer) -> Tensor:
    return opt.param_groups[0]["params"][0]


def with_zeroed_corrections(lab: BackendUnderTest, opt: FlashOptimizer, stale: Tensor | None = None) -> FlashOptimizer:
    """The optimizer that the changed one has to behave like: the weights as they are, corrections 0 where stale."""
    p = the_only(opt)
    state = {k: v.clone() for k, v in opt.state[p].items()}
    state["error"][slice(None) if stale is None else stale] = 0
    other = lab.build(FlashAdamW, [nn.Parameter(p.detach().clone())], lr=1e-2)
    saved = other.state_dict()
    other.load_state_dict({**saved, "state": {0: state}})
    return other


@pytest.mark.parametrize("change", WHOLE, ids=lambda f: f.__name__)
def test_a_step_takes_the_weights_as_they_are(backend: BackendUnderTest, change: Callable[[Tensor], None]):
    opt = trained(backend)
    change(the_only(opt))
    expected = with_zeroed_corrections(backend, opt)
    train(opt, 1, first=1)
    train(expected, 1, first=1)
    assert_same(opt, expected)


@pytest.mark.parametrize("look", ["master_weight", "state_dict"])
@pytest.mark.parametrize("change", WHOLE, ids=lambda f: f.__name__)
def test_nobody_sees_a_stale_correction(change: Callable[[Tensor], None], look: str):
    opt = trained(BackendUnderTest("eager", torch.device("cpu")))
    p = the_only(opt)
    change(p)
    if look == "master_weight":
        assert_same_bits(opt.master_weight(p), p.detach().float())
    else:
        assert not opt.state_dict()["state"][0]["error"].any()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("tile", [0, 1, TILES // 2, TILES - 1])
def test_one_element_makes_one_tile_stale(backend: BackendUnderTest, tile: int, dtype: torch.dtype):
    """Fewer would be wrong, more would throw away what is right."""
    opt = trained(backend, dtype)
    p = the_only(opt)
    before, error = opt.master_weight(p), opt.state[p]["error"].clone()
    index = first_element(tile) + 3
    flat = p.data.view(-1)
    flat[index : index + 1].view(torch.int16).bitwise_xor_(1)  # the least change there is
    stale = tile_of_each_element(backend.device) == tile
    expected = with_zeroed_corrections(backend, opt, stale)
    joined = opt.master_weight(p)
    assert_same_bits(joined[stale], p.detach().float()[stale], "touched tile")
    assert_same_bits(joined[~stale], before[~stale], "other tiles")
    assert torch.equal(opt.state[p]["error"][~stale], error[~stale])
    # The kernel itself finds out in a step, too: undo what master_weight() has tidied up.
    opt.state[p]["error"].copy_(error)
    train(opt, 1, first=1)
    train(expected, 1, first=1)
    assert_same(opt, expected)


@pytest.mark.parametrize("shape", [(), (1,), (33,), (5, 7), (40, 3)], ids=str)
def test_tensors_without_groups(backend: BackendUnderTest, shape: tuple[int, ...]):
    opt = trained(backend, shape=shape)
    p = the_only(opt)
    p.data.mul_(0.5)
    expected = with_zeroed_corrections(backend, opt, torch.ones(shape, dtype=torch.bool, device=backend.device))
    assert_same_bits(opt.master_weight(p), p.detach().float())
    train(opt, 1, first=1)
    train(expected, 1, first=1)
    assert_same(opt, expected)


def test_unchanged_weights_keep_their_corrections(backend: BackendUnderTest):
    """Reading, saving and writing the same bits again are no change."""
    opt, untouched = trained(backend), trained(backend)
    p = the_only(opt)
    opt.state_dict()
    opt.master_weight(p)
    p.data.copy_(p.detach().clone())
    p.data = p.detach().clone()
    train(opt, 1, first=1)
    train(untouched, 1, first=1)
    assert_same(opt, untouched)


def test_corrections_count_again_after_the_next_step(backend: BackendUnderTest):
    opt = trained(backend)
    p = the_only(opt)
    p.data.mul_(0.5)
    train(opt, 1, first=1)
    assert opt.state[p]["error"].any()
    assert not torch.equal(opt.master_weight(p), p.detach().float())


def test_weights_changed_after_a_load_are_trusted_until_the_first_step_only(backend: BackendUnderTest):
    opt = trained(backend)
    p = the_only(opt)
    saved, weight = copy.deepcopy(opt.state_dict()), p.detach().clone()
    p.data.zero_()
    opt.load_state_dict(saved)
    p.data.copy_(weight)
    assert not torch.equal(opt.master_weight(p), p.detach().float())
    train(opt, 1, first=1)
    p.data.mul_(2)
    assert_same_bits(opt.master_weight(p), p.detach().float())


def test_a_step_skipped_by_the_scaler_leaves_the_check_in_force(backend: BackendUnderTest):
    opt = trained(backend)
    p = the_only(opt)
    p.data.mul_(0.5)
    set_gradients([p], seed=5)
    opt.grad_scale = torch.tensor(1.0, device=p.device)
    opt.found_inf = torch.tensor(1.0, device=p.device)
    opt.step()
    del opt.grad_scale, opt.found_inf
    assert_same_bits(opt.master_weight(p), p.detach().float())
