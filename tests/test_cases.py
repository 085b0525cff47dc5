"""Cases that people ran into with libraries of this kind, and the tests that keep them from happening here.

| case | what | test |
|---|---|---|
| 1 | 20 steps, DCP round trip into a fresh optimizer, 5 more: equal to the unbroken run | here |
| 2 | odd shapes on two ranks: full state dict and DCP, gathered values equal the shards | here |
| 3 | a state dict straight after construction | test_state_dict |
| 4 | save and load keep bits, dtypes and bytes | test_state_dict |
| 5 | saved on 2 ranks, loaded on 1 and 4 | sharding/test_torch_checkpoint, checkpoint/test_matrix |
| 6 | dcp.async_save with CPU staging | sharding/test_torch_checkpoint |
| 7 | the learning rates go on after a DCP round trip, each group from its own base | here; test_learning_rates |
| 8 | groups [only frozen or empty, trainable] through DCP, then a step | here |
| 9 | the moments of a frozen half survive | test_state_dict |
| 10 | map_location | gpu/test_gpu |
| 11 | bf16 as the default dtype, 300 steps: the count reads 300 | here |
| 12 | model first or optimizer first | test_state_dict |
| 13 | state of torch.optim.AdamW, both ways | test_torch_state |
| 14 | deepcopy and pickle | test_state_dict |
| 15 | peak memory of a load | checkpoint/ (memory) |
| 16 | an empty parameter, and ranks without rows of a bias of 3 | sharding/test_fsdp2_follows (``empty``, ``three``) |
| 17 | Linear(8, 2) on 4 ranks: no crash, the same keys on all | here |
| 18 | 6,144 elements: the same formats and codes on any ranks | sharding/test_fsdp2_follows (``long``) |
| 19 | ignored_params: DTensors and plain tensors in one group | sharding/test_fsdp2_follows (``scalar``); here |
| 20 | an optimizer built before fully_shard | sharding/test_fsdp2_refusals |
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flashdist import FlashAdamW
from tests.support.backends import parameters, set_gradients
from tests.support.odd_model import digests
from tests.support.ranks import run_ranks

BF16 = torch.bfloat16


def sharded(world_size: int, *layers: nn.Module, seed: int = 0, **arguments: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(*layers).to(BF16)
    for layer in model:
        layer.reset_parameters()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), **arguments)
    return model


def train(model: nn.Module, opt: torch.optim.Optimizer, first: int, steps: int, width: int) -> None:
    for t in range(first, first + steps):
        generator = torch.Generator().manual_seed(t)
        model(torch.randn(4, width, generator=generator).to(BF16)).float().square().mean().backward()
        opt.step()
        opt.zero_grad()


def through_dcp(path: str, model: nn.Module, opt: Any, other: nn.Module, other_opt: Any) -> None:
    weights, states = get_state_dict(model, opt)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=path)
    weights, states = get_state_dict(other, other_opt)
    loaded = {"model": weights, "optim": states}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(other, other_opt, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])


def case_1(rank: int, world_size: int, path: str) -> bool:
    def build(seed: int) -> tuple[nn.Module, FlashAdamW]:
        model = sharded(world_size, nn.Linear(40, 37), nn.Linear(37, 5), seed=seed)
        return model, FlashAdamW(model.parameters(), lr=1e-2)

    model, opt = build(0)
    train(model, opt, 0, 20, 40)
    other, other_opt = build(1)
    through_dcp(path, model, opt, other, other_opt)
    for m, o in ((model, opt), (other, other_opt)):
        train(m, o, 20, 5, 40)
    return digests(model, opt) == digests(other, other_opt)


def test_case_1_a_resumed_run_equals_the_unbroken_one(tmp_path: Path):
    assert run_ranks(case_1, 2, str(tmp_path / "checkpoint")) == [True, True]


def case_2_and_17(rank: int, world_size: int, path: str, shape: tuple[int, int]) -> list[str]:
    model = sharded(world_size, nn.Linear(*shape))
    opt = FlashAdamW(model.parameters(), lr=1e-2)
    train(model, opt, 0, 2, shape[0])
    weights, states = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))
    named = dict(model.named_parameters())
    keys = sorted(f"{name}.{key}" for name, state in states["state"].items() for key in state)
    for name, state in states["state"].items():
        live = dict(
            zip(opt.state[named[name]], opt.state_dict()["state"][list(named).index(name)].values(), strict=True)
        )
        for key, value in state.items():
            mine = live[key]
            whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
            assert not isinstance(value, DTensor)
            assert value.dtype == whole.dtype
            assert torch.equal(value, whole), (name, key)
    assert weights["0.weight"].shape == (shape[1], shape[0])
    other = sharded(world_size, nn.Linear(*shape), seed=1)
    other_opt = FlashAdamW(other.parameters(), lr=1e-2)
    through_dcp(path, model, opt, other, other_opt)
    assert digests(other, other_opt) == digests(model, opt)
    return keys


@pytest.mark.parametrize(("world_size", "shape"), [(2, (5, 7)), (4, (8, 2))], ids=["case 2", "case 17"])
def test_cases_2_and_17_odd_shapes(tmp_path: Path, world_size: int, shape: tuple[int, int]):
    ranks = run_ranks(case_2_and_17, world_size, str(tmp_path / "checkpoint"), shape)
    assert all(keys == ranks[0] for keys in ranks)
    assert {key.split(".")[-1] for key in ranks[0]} == {"step", "error", "exp_avg", "exp_avg_sq"}


def case_7(rank: int, world_size: int, path: str) -> tuple[list[Any], list[Any]]:
    def build() -> tuple[nn.Module, FlashAdamW, Any]:
        model = sharded(world_size, nn.Linear(40, 5))
        groups = [{"params": [model[0].weight], "lr": 1e-3}, {"params": [model[0].bias], "lr": 1e-4}]
        opt = FlashAdamW(groups)
        return model, opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.5**t)

    def rates(model: nn.Module, opt: FlashAdamW, scheduler: Any, first: int) -> list[Any]:
        seen = []
        for t in range(first, first + 3):
            train(model, opt, t, 1, 40)
            scheduler.step()
            seen.append(scheduler.get_last_lr())
        return seen

    model, opt, scheduler = build()
    rates(model, opt, scheduler, 0)
    other, other_opt, _ = build()
    through_dcp(path, model, opt, other, other_opt)
    again = torch.optim.lr_scheduler.LambdaLR(other_opt, lambda t: 0.5**t, last_epoch=scheduler.last_epoch - 1)
    return rates(model, opt, scheduler, 3), rates(other, other_opt, again, 3)


def test_case_7_the_learning_rates_go_on(tmp_path: Path):
    unbroken, resumed = run_ranks(case_7, 2, str(tmp_path / "checkpoint"))[0]
    assert unbroken == resumed
    assert unbroken[0] == [1e-3 * 0.5**4, 1e-4 * 0.5**4]


def case_8(rank: int, world_size: int, path: str) -> list[Any]:
    def build() -> tuple[nn.Module, FlashAdamW]:
        model = sharded(world_size, nn.Linear(40, 5), nn.Linear(5, 3))
        model[0].requires_grad_(False)
        frozen, rest = list(model[0].parameters()), list(model[1].parameters())
        return model, FlashAdamW([{"params": frozen, "weight_decay": 0.3}, {"params": [], "lr": 0.7}, {"params": rest}])

    model, opt = build()
    train(model, opt, 0, 2, 40)
    other, other_opt = build()
    other_opt.param_groups[0]["weight_decay"] = 0.0
    through_dcp(path, model, opt, other, other_opt)
    for m, o in ((model, opt), (other, other_opt)):
        train(m, o, 2, 1, 40)
    same = digests(model, opt) == digests(other, other_opt)
    return [same, other_opt.param_groups[0]["weight_decay"], other_opt.param_groups[1]["lr"]]


def test_case_8_groups_of_frozen_parameters_and_of_none(tmp_path: Path):
    assert run_ranks(case_8, 2, str(tmp_path / "checkpoint")) == [[True, 0.3, 0.7]] * 2


def test_case_11_the_count_of_steps_is_exact_under_another_default_dtype():
    torch.set_default_dtype(BF16)
    try:
        params = parameters([(2, 32), (3,)], BF16)
        opt = FlashAdamW(params)
        set_gradients(params, seed=0)
        for _ in range(300):
            opt.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert [float(opt.state[p]["step"]) for p in params] == [300.0, 300.0]
    assert copy.deepcopy(opt.state_dict()["state"][0]["step"]).dtype == torch.float32


def case_19(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(40, 7).to(BF16)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), ignored_params={model.bias})
    opt = FlashAdamW(model.parameters(), lr=1e-2)
    before: list[Tensor] = [model.weight.detach().full_tensor().clone(), model.bias.detach().clone()]
    train(model, opt, 0, 1, 40)
    moved = [not torch.equal(model.weight.detach().full_tensor(), before[0]), not torch.equal(model.bias, before[1])]
    return [*moved, isinstance(model.weight, DTensor), isinstance(model.bias, DTensor), len(opt.param_groups)]


def test_case_19_ignored_parameters_beside_sharded_ones():
    assert run_ranks(case_19, 2) == [[True, True, True, False, 1]] * 2


def test_the_table_above_names_all_twenty_and_files_that_exist():
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", __doc__ or "", re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 21))
    for number, where in rows:
        for name in re.findall(r"[\w/]*test_\w+", where):
            path = Path(__file__).parent / f"{name}.py"
            assert path.exists(), (number, path)
        source = Path(__file__).read_text(encoding="utf-8")
        assert not where.startswith("here") or re.search(rf"def test_cases?_(\w*_)?{number}_", source), number
