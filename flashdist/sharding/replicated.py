"""ZeRO-1 for DDP and plain replicated models: the optimizer's states are spread over the data-parallel ranks."""

from __future__ import annotations

import hashlib
import math
import warnings
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flashdist.numerics.groups import group_layout
from flashdist.optimizer import FlashOptimizer
from flashdist.param_state import expected_entries
from flashdist.sharding.partition import AsPlaced
from flashdist.sharding.row_cut import Rows, cut_rows, leading_dims
from flashdist.sharding.row_partition import RowPartition
from flashdist.sharding.row_shard import RowShard


def shard_states(
    opt: FlashOptimizer, process_group: dist.ProcessGroup | None = None, *, model: nn.Module | None = None
) -> None:
    """Spread the states of an optimizer over the ranks that have the same parameters (ZeRO stage 1).

    Each rank keeps and steps a run of rows of about ``1 / ranks`` of the states' bytes; after each step the new weights
    are all-gathered. Weights and codes have the same bits as without. ``opt.state[p]`` then holds
    :class:`~flashdist.sharding.row_shard.RowShard` under the same keys, which torch.distributed.checkpoint saves and
    loads with any number of ranks. To be called on all ranks, before the first step, state_dict() or load_state_dict().

    Args:
        opt: a new optimizer, whose parameters and gradients are the same on all ranks.
        process_group: the data-parallel ranks; by default those of ``model`` if it is a DistributedDataParallel, else
            all.
        model: the DistributedDataParallel model, whose process group is taken, and whose settings are looked at: a
            warning where it keeps a second copy of the gradients, an error in a step inside its join().

    Raises:
        RuntimeError: no process group; states exist already or are sharded already.
        ValueError: parameters that are DTensors, have gaps in memory, or differ from another rank's (naming the first).

    Source: Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5.1 (P_os).
    """
    group = _process_group(process_group, model)
    if isinstance(model, DistributedDataParallel) and not model.gradient_as_bucket_view:
        warnings.warn(
            "DistributedDataParallel keeps a second copy of all gradients here. Build it with "
            "gradient_as_bucket_view=True to save that memory.",
            stacklevel=2,
        )
    params, leads, costs = _agreed(opt, group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    rows: dict[Tensor, Rows] = {}
    # Frozen parameters have no states now. If they get some, these should be spread as well.
    for trainable in (True, False):
        which = [i for i, p in enumerate(params) if p.requires_grad == trainable]
        for i, bounds in zip(which, cut_rows([costs[i] for i in which], ranks), strict=True):
            rows[params[i]] = Rows(leads[i], bounds, rank)
    opt._partition = RowPartition(rows, group, model if isinstance(model, DistributedDataParallel) else None)


def full_state_dict(
    opt: FlashOptimizer, state_dict: dict[str, Any] | None = None, *, cpu_offload: bool = False
) -> dict[str, Any]:
    """``opt.state_dict()`` with whole plain tensors, on every rank (a collective call).

    It needs the memory of unsharded states. It loads into any optimizer for these parameters, sharded or not.

    Args:
        opt: the optimizer.
        state_dict: what to make whole instead of ``opt.state_dict()``, say ``torch_state_dict(opt)``.
        cpu_offload: move each tensor to the CPU before the next one is gathered.
    """
    packed = opt.state_dict() if state_dict is None else state_dict

    def whole(value: Tensor) -> Tensor:
        full = value.full_tensor() if isinstance(value, RowShard) else value
        return full.cpu() if cpu_offload else full

    states = {key: {k: whole(v) for k, v in state.items()} for key, state in packed["state"].items()}
    return {**packed, "state": states}


def _process_group(given: dist.ProcessGroup | None, model: nn.Module | None) -> dist.ProcessGroup:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "shard_states needs the ranks of a process group: call torch.distributed.init_process_group first"
        )
    of_model = model.process_group if isinstance(model, DistributedDataParallel) else None
    group = given or of_model or dist.group.WORLD
    assert group is not None
    if dist.get_rank(group) < 0:
        raise ValueError("this rank is not in the process group that was given to shard_states")
    if of_model is not None and dist.get_process_group_ranks(group) != dist.get_process_group_ranks(of_model):
        raise ValueError(
            f"the process group has the ranks {dist.get_process_group_ranks(group)}, the model's "
            f"{dist.get_process_group_ranks(of_model)}: give shard_states the group over which gradients are averaged"
        )
    return group


def _check_optimizer(opt: FlashOptimizer) -> None:
    if not isinstance(opt, FlashOptimizer):
        raise TypeError(f"shard_states takes an optimizer of flashdist, got {type(opt).__name__}")
    if not isinstance(opt._partition, AsPlaced):
        raise RuntimeError("the states of this optimizer are sharded already")
    if opt.state:
        raise RuntimeError(
            "the optimizer has states already: call shard_states right after its construction, before its first step, "
            "state_dict() or load_state_dict(). To shard a run that has begun, build a new optimizer, call "
            "shard_states, and load the old one's state_dict() into it."
        )


def _check_plain(opt: FlashOptimizer, params: list[Tensor]) -> None:
    sharded = [p for p in params if isinstance(p, DTensor)]
    if not sharded:
        return
    if len(sharded) == len(params):
        raise ValueError(
            f"{opt._name(sharded[0])} and all others are DTensors, whose states are sharded already, as the parameters "
            "are: leave out shard_states"
        )
    raise ValueError(
        f"{opt._name(sharded[0])} is a DTensor ({len(sharded)} of {len(params)} parameters are), whose states are "
        "sharded already, as the parameter is. shard_states is for replicated parameters: give these an optimizer of "
        "their own, or leave out shard_states"
    )


def _lead(opt: FlashOptimizer, p: Tensor) -> int:
    lead = leading_dims(p, group_layout(p.shape))
    if lead is None:
        raise ValueError(
            f"{opt._name(p)} has the strides {p.stride()}, so that its elements overlap or leave gaps in memory. Its "
            "rows cannot be gathered in place: replace its data by p.data.contiguous() before shard_states."
        )
    return lead


def _row_cost(opt: FlashOptimizer, p: Tensor, group_index: int, lead: int) -> tuple[int, int]:
    """Rows of a parameter and the bytes of state that each has (of its weight, where it has no state)."""
    group = opt.param_groups[group_index]
    entries = expected_entries(p, group, opt._rule(group), group_layout(p.shape))
    # All entries but the step have the parameter's leading dimensions.
    size = sum(math.prod(e.shape) * e.dtype.itemsize for e in entries if e.key != "step") or p.numel() * p.itemsize
    rows = math.prod(p.shape[:lead])
    return rows, size // rows


def _agreed(opt: FlashOptimizer, group: dist.ProcessGroup) -> tuple[list[Tensor], list[int], list[tuple[int, int]]]:
    """The parameters and what the cut depends on, checked here and compared with the other ranks.

    What is wrong on one rank is raised on all of them: none is left waiting.
    """
    problem: Exception | None = None
    lines: list[str] = []
    try:
        _check_optimizer(opt)
        params, groups = opt._parameters(), opt._known_groups
        _check_plain(opt, params)
        leads = [_lead(opt, p) for p in params]
        costs = [_row_cost(opt, p, g, lead) for p, g, lead in zip(params, groups, leads, strict=True)]
        lines = [
            f"{opt._name(p)}, {p.dtype}, strides {p.stride()}, requires_grad={p.requires_grad}, state of {size} bytes "
            f"in each of {rows} rows, param group {g}"
            for p, (rows, size), g in zip(params, costs, groups, strict=True)
        ]
    except Exception as error:
        problem = error
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (None if problem is None else str(problem), digest), group=group)
    if problem is not None:
        raise problem
    for rank, (elsewhere, _) in enumerate(answers):
        if elsewhere is not None:
            raise RuntimeError(f"shard_states cannot go on, for rank {rank} of its group has a problem: {elsewhere}")
    if len(set(answers)) > 1:
        _name_the_difference(lines, group)
    return params, leads, costs


def _name_the_difference(lines: list[str], group: dist.ProcessGroup) -> None:
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, lines, group=group)
    for rank, others in enumerate(everybody):
        for i in range(max(len(others), len(everybody[0]))):
            here, there = (x[i] if i < len(x) else "no further parameter" for x in (everybody[0], others))
            if here != there:
                raise ValueError(
                    f"the ranks have different parameters; the first difference is number {i}: {here} on rank 0, "
                    f"{there} on rank {rank}. Build the same model and param groups on all ranks."
                )
