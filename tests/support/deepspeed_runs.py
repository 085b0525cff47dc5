"""DeepSpeed engines inside the pool of ranks, and what the tests look at."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flashdist  # noqa: F401 - DeepSpeed finds its optimizers by name
from flashdist.integrations import deepspeed_releases as releases

# Without importing DeepSpeed: that is done in the ranks.
RELEASE = tuple(int(part) for part in importlib.metadata.version("deepspeed").split("+")[0].split(".")[:3])


class Net(nn.Module):
    """By default of odd sizes: rows that are and are not multiples of 32, 1-D parameters, a tiny row."""

    def __init__(self, inputs: int = 37, width: int = 96, classes: int = 5) -> None:
        super().__init__()
        self.inputs = inputs
        self.first = nn.Linear(inputs, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, 64, bias=False)
        self.last = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.first(x[:, : self.inputs])))
        return self.last(torch.tanh(self.second(h)))


def even_net() -> Net:
    """Sizes for which no border of 2 partitions, at any stage, cuts a group of 32."""
    return Net(64, 96, 32)


@contextmanager
def deepspeed_on_this_group() -> Iterator[Any]:
    """DeepSpeed on the process group of the current job, of which nothing is left for the next one."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups, logger

    logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", module="torch|deepspeed")
    # It would compile a C++ extension for reductions in shared memory.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Counters that must agree over the ranks, of which not all took part in every job before.
    Init.param_id = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    gather = Init._allgather_params_coalesced
    if RELEASE < releases.WAITS_FOR_GATHERS:
        # It waits for the last of several gathers only: each is the last one here.
        Init._allgather_params_coalesced = lambda self, params, *rest, **kwargs: [
            gather(self, [p], *rest, **kwargs) for p in params
        ]
    # Stage 3 puts another linear function in torch's place, in which gradients come in another order.
    linear = nn.functional.linear
    before = {k: v for k, v in vars(groups).items() if k.startswith("_") and k.isupper()}
    before = {k: dict(v) if isinstance(v, dict) else v for k, v in before.items()}
    try:
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        yield deepspeed
    finally:
        comm.cdb = None
        Init._allgather_params_coalesced = gather
        nn.functional.linear = linear
        for key, value in before.items():
            setattr(groups, key, value)
        gc.collect()


def config(
    stage: int, optimizer: str = "FlashAdamW", params: dict[str, Any] | None = None, **other: Any
) -> dict[str, Any]:
    """A JSON as users write it. Buckets are small, so that DeepSpeed's own buffers do not hide the optimizer's."""
    zero = {"stage": stage, "reduce_bucket_size": 8192, "allgather_bucket_size": 8192}
    if stage == 3:
        zero.update(stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=4096)
    zero.update(other.pop("zero", {}))
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,  # its default is 1.0
        "bf16": {"enabled": True},
        "optimizer": {"type": optimizer, "params": {"lr": 1e-2, **(params or {})}},
        "zero_optimization": zero,
        "steps_per_print": 10**9,
        **other,
    }


def make(
    deepspeed: Any,
    ds_config: dict[str, Any],
    net: Callable[[], nn.Module] = Net,
    groups: Callable[[nn.Module], Any] = lambda model: list(model.parameters()),
    optimizer: Callable[[Any], Any] | None = None,
    seed: int = 0,
) -> Any:
    """An engine; with ``optimizer`` the JSON's is not used."""
    torch.manual_seed(seed)
    model = net()
    if optimizer is None:
        return deepspeed.initialize(model=model, model_parameters=groups(model), config=ds_config)[0]
    return deepspeed.initialize(model=model, optimizer=optimizer(groups(model)), config=ds_config)[0]


def batch(step: int, rank: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """Inputs from which the class can be learned."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 64, generator=generator)
    return x.bfloat16(), x[:, :5].argmax(dim=1)


def loss_of(module: Any, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(module(x).float(), y)


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    """Losses of this rank; ``steps`` counts micro-batches."""
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(engine, step, dist.get_rank())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_without_deepspeed(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    steps: int,
    clip: float = 0.0,
    accumulate: int = 1,
    on_step: Callable[[int], None] = lambda _: None,
) -> list[float]:
    """The same training with the gradients of all ranks averaged in bf16; ``steps`` counts micro-batches."""
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, dist.get_rank())
        (loss / accumulate).backward()
        losses.append(loss.item())
        if (step + 1) % accumulate:
            continue
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(dist.get_world_size())
            dist.all_reduce(p.grad)
        if clip:
            opt.clip_grad_norm_(clip) if hasattr(opt, "clip_grad_norm_") else None
        on_step(step // accumulate)
        opt.step()
        opt.zero_grad()
    return losses


def live_storages() -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors of this process. While the result is kept none of it is freed."""
    gc.collect()
    found = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and t.device.type != "meta"]
    found += [t.grad for t in found if t.is_leaf and t.grad is not None]
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in found}


def bytes_since(before: dict[int, torch.UntypedStorage]) -> int:
    """Bytes of what is alive now and was not when ``before`` was taken (and is kept since)."""
    return sum(storage.nbytes() for key, storage in live_storages().items() if key not in before)


def settled_bytes_since(before: dict[int, torch.UntypedStorage]) -> int:
    """The least of a few readings: a collective call's thread may hold its tensor for a moment longer. What leaks
    stays."""
    least = bytes_since(before)
    for _ in range(3):
        time.sleep(0.1)
        least = min(least, bytes_since(before))
    return least


def bucket_bytes(zero: Any) -> int:
    """DeepSpeed's own buffers for reductions."""
    buffers = [bucket.buffer for bucket in getattr(zero, "ipg_buckets", {}).values()]
    flat = [t for b in buffers for t in (b if isinstance(b, list) else [b]) if t is not None]
    return sum(t.untyped_storage().nbytes() for t in flat)


def gathered(engine: Any) -> dict[str, Tensor]:
    """The parameters that stage 3 has gathered now: DeepSpeed's own buffers, too."""
    if engine.zero_optimization_stage() < 3:
        return {}
    return {name: p for name, p in engine.module.named_parameters() if p.ds_status.name == "AVAILABLE"}


def weights(deepspeed: Any, engine: Any) -> dict[str, Tensor]:
    """The model's whole bf16 weights."""
    named = dict(engine.module.named_parameters())
    if engine.zero_optimization_stage() < 3:
        return {name: p.detach().clone() for name, p in named.items()}
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: p.detach().clone() for name, p in named.items()}


def packed_states(engine: Any) -> list[dict[str, Tensor]]:
    """Copies of all state buffers of this rank, and of the partitions without DeepSpeed's padding."""
    opt = engine.basic_optimizer
    return [
        {"weight": torch.cat([packed.weight_of(i) for i in range(len(packed.segments))]), "steps": packed.steps.clone()}
        | {name: buffer.clone() for name, buffer in packed.buffers.items()}
        for packed in opt.states()
    ]


def equal_states(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(one, other, strict=True)
    )


MOMENTS = {"FlashAdamW": ("exp_avg", "exp_avg_sq"), "FlashLion": ("exp_avg",), "FlashSGD": ("momentum_buffer",)}


def snapshot(engine: Any) -> dict[str, dict[str, Tensor]]:
    """fp32 master weights and moments of all parameters, as DeepSpeed's own functions give them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    keys = MOMENTS[type(engine.basic_optimizer).__name__]
    found = {}
    for name, p in engine.module.named_parameters():
        found[name] = {"fp32": safe_get_full_fp32_param(p).clone()}
        found[name] |= {key: safe_get_full_optimizer_state(p, key).clone() for key in keys}
    return found
