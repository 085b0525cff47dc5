"""What sharded models are refused for, by name and with nothing changed; and memory per rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from flashdist import FlashAdamW
from tests.support.odd_model import build, fill, make_optimizer, part_of, seeded
from tests.support.ranks import run_ranks

BF16 = torch.bfloat16


def refusal(action: Callable[[], Any]) -> str:
    """The error that ``action`` raises, by type and message."""
    try:
        action()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def built_too_early(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = nn.Sequential(nn.Linear(40, 5), nn.Linear(5, 3)).to(BF16)
    opt = FlashAdamW(model.named_parameters(), lr=0.1)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    model(torch.ones(2, 40, dtype=BF16)).sum().backward()
    found["whole model"] = [refusal(opt.step), refusal(opt.state_dict), refusal(opt.step)]
    found["states"] = len(opt.state)
    # Sharded after a step already, and one layer only: the other still gets gradients.
    model = nn.Sequential(nn.Linear(40, 5), nn.Linear(5, 3)).to(BF16)
    opt = FlashAdamW(model.named_parameters(), lr=0.1)
    model(torch.ones(2, 40, dtype=BF16)).sum().backward()
    opt.step()
    fully_shard(model[1], mesh=init_device_mesh("cpu", (world_size,)))
    opt.zero_grad()
    model(torch.ones(2, 40, dtype=BF16)).sum().backward()
    before = model[0].weight.detach().clone()
    found["one layer"] = [refusal(opt.step), refusal(opt.state_dict)]
    found["unchanged"] = torch.equal(before, model[0].weight)
    # A release of torch whose fully_shard leaves no trace: a first step without any gradient.
    found["no trace"] = [refusal(FlashAdamW([nn.Parameter(torch.zeros(2, 32))]).step)]
    frozen = FlashAdamW([nn.Parameter(torch.zeros(2, 32), requires_grad=False)])
    found["nothing to train"] = refusal(frozen.step)
    return found


def test_case_20_an_optimizer_built_before_fully_shard():
    for found in run_ranks(built_too_early, 2):
        for message in found["whole model"]:
            assert "parameter 0.weight" in message
            assert "Build the optimizer after fully_shard" in message
        assert found["states"] == 0
        assert all("parameter 1.weight" in message for message in found["one layer"])
        assert found["unchanged"]
        assert "no gradient at all" in found["no trace"][0]
        assert found["nothing to train"] == "no error"


def fsdp1(rank: int, world_size: int) -> list[str]:
    import warnings

    warnings.simplefilter("ignore")
    found = []
    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(
            nn.Linear(40, 5), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        found.append(refusal(lambda model=model: FlashAdamW(model.parameters())))
    return found


def test_fsdp1_is_refused():
    for message in run_ranks(fsdp1, 2)[0]:
        assert message.startswith("TypeError: parameter param_groups[0]['params'][0]"), message
        assert "FSDP1" in message
        assert "fully_shard" in message


def clip(rank: int, world_size: int, strategy: str) -> dict[Any, tuple[float, float]]:
    """Ours and torch's norm of the same gradients; torch's takes no plain tensors beside DTensors."""
    found = {}
    model = build(strategy, world_size)
    fill(model, 0)
    params = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() > 0 and n != "empty"]
    by_mesh: dict[Any, list[Any]] = {}
    for i, p in enumerate(params):
        p.grad = part_of((seeded(str(i), p.shape, 5) * 0.1).to(p.dtype), p)
        by_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p)
    for order in (2.0, 1.0):  # torch takes no inf norm of an empty shard
        ours = float(FlashAdamW(params).clip_grad_norm_(1.0, order))
        # On each mesh by itself; together they are the norm of the norms.
        norms = [torch.nn.utils.get_total_norm([p.grad for p in some], order) for some in by_mesh.values()]
        whole = [float(n.full_tensor() if hasattr(n, "full_tensor") else n) for n in norms]
        found[order] = ours, float(torch.linalg.vector_norm(torch.tensor(whole), order))
    opt = make_optimizer(model, strategy)  # with the plain scalar
    scalar = dict(model.named_parameters())["scalar"]
    scalar.grad = torch.tensor(3.0, dtype=BF16)
    found["mixed"] = float(opt.clip_grad_norm_(1.0)), (found[2.0][0] ** 2 + 9.0) ** 0.5
    return found


@pytest.mark.parametrize(("strategy", "world_size"), [("fsdp2", 2), ("hsdp", 4), ("fsdp2_tp", 4)])
def test_the_clipped_norm_is_torch_s(strategy: str, world_size: int):
    ranks = run_ranks(clip, world_size, strategy)
    assert all(found == ranks[0] for found in ranks), "every rank must clip by the same factor"
    for order, (ours, theirs) in ranks[0].items():
        # torch sums 16-bit gradients' norms rounded to bf16: 2^-9 each.
        assert ours == pytest.approx(theirs, rel=1e-5 if order == "mixed" else 4e-3), order
    single = clip(0, 1, "single")
    assert ranks[0][2.0][0] == pytest.approx(single[2.0][0], rel=1e-6)


def bytes_per_parameter(rank: int, world_size: int) -> tuple[int, int]:
    """Bytes that this rank holds, and elements of the whole model."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(10))).to(BF16)
    numel = sum(p.numel() for p in model.parameters())
    if world_size > 1 or torch.distributed.is_initialized():
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    opt = FlashAdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.state_dict()  # allocates what a step would
    return opt.memory_summary().total, numel


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_memory_per_rank(world_size: int):
    """(4 + 3.1875) / N bytes per parameter, within 3 %: weights, gradients, states."""
    for total, numel in run_ranks(bytes_per_parameter, world_size):
        assert numel > 10_000_000
        assert total / numel == pytest.approx(7.1875 / world_size, rel=0.03)
