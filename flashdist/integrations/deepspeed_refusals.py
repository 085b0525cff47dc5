"""What DeepSpeed can be configured to do that our optimizers refuse, before training and with the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flashdist.integrations.deepspeed_releases import version
from flashdist.optimizer import FlashOptimizer


def refuse(engine: Any, opt: FlashOptimizer, minimum: tuple[int, int, int]) -> None:
    """Check a configuration once the optimizer is built and before DeepSpeed partitions anything.

    Raises:
        ValueError: naming the setting, why it cannot be, and the remedy.
    """
    found = version()
    if found < minimum:
        needed, got = ".".join(map(str, minimum)), ".".join(map(str, found))
        raise ValueError(f"{_name(opt)} needs DeepSpeed {needed} or newer, this is {got}: pip install -U deepspeed")
    hook = "_configure_zero_optimizer" if engine.zero_optimization() else "_configure_fp16_optimizer"
    if not hasattr(type(engine), hook):
        raise ValueError(
            f"this release of flashdist does not know DeepSpeed {'.'.join(map(str, found))}, whose engine has no "
            f"{hook}: take a release that is named in docs/deepspeed.md, or a newer flashdist"
        )
    for setting, why in _reasons(engine):
        raise ValueError(f"{_name(opt)} under DeepSpeed: {setting} is not supported: {why}")
    if opt.state:
        raise ValueError(f"{_name(opt)} has taken steps already: hand it to deepspeed.initialize before its first step")


def _name(opt: FlashOptimizer) -> str:
    return type(opt).__name__


def _reasons(engine: Any) -> Iterator[tuple[str, str]]:
    """The settings that are refused, with the reason."""
    config, zero = engine._config, engine._config.zero_config
    stage = int(engine.zero_optimization_stage())
    if engine.fp16_enabled():
        yield "fp16", 'set "bf16": {"enabled": true} instead, the master weight continues a bf16 weight'
    if not engine.bfloat16_enabled():
        yield 'a model without bf16 ("bf16.enabled" is false)', 'set "bf16": {"enabled": true}'
    if engine.torch_autocast_enabled():
        yield "torch_autocast", "it keeps fp32 weights; remove it, the weights are bf16 themselves"
    for which in ("optimizer", "param"):
        offload = getattr(zero, f"offload_{which}", None)
        device = getattr(offload, "device", "none")
        device = str(getattr(device, "value", device))
        if offload is not None and device != "none":
            yield (
                f"zero_optimization.offload_{which} ({device})",
                "weights and states live and are stepped on the device of the model; remove it, or keep DeepSpeed's "
                "own CPU optimizer",
            )
    if getattr(zero, "zenflow", None):
        yield "zero_optimization.zenflow", "it steps parts of the weights with an optimizer of its own; remove it"
    if getattr(engine, "super_offload", bool)():
        yield "super_offload", "it moves fp32 master weights to the CPU; remove it"
    if engine.zero_elastic_checkpoint():
        yield (
            "zero_optimization.elastic_checkpoint",
            "it cuts every state tensor at the padding; set it to false, a checkpoint of ours loads on any number of "
            "ranks as it is",
        )
    model_dtype, accumulation = engine.get_data_types()
    if stage == 0 and accumulation != model_dtype:
        yield (
            f"data_types.grad_accum_dtype {accumulation} at ZeRO stage 0",
            "use stage 1, or leave it at the dtype of the weights",
        )
    yield from _untested(engine, config, zero)


def _untested(engine: Any, config: Any, zero: Any) -> Iterator[tuple[str, str]]:
    """What may work but was never tried: a refusal is better than a wrong result."""
    why = (
        "it has not been tested with partitions that alias the model's weights; leave it out, or use DeepSpeed's AdamW"
    )
    if engine.has_moe_layers:
        yield "a model with DeepSpeed's MoE layers", why
    if engine.pipeline_parallelism:
        yield "a PipelineModule", why
    if getattr(engine, "autotp_size", int)() > 1:
        yield "tensor_parallel.autotp_size above 1", why
    for setting in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if getattr(zero, setting, False):
            yield f"zero_optimization.{setting}", why
    if getattr(zero, "zero_hpz_partition_size", 1) > 1:
        yield "zero_optimization.zero_hpz_partition_size above 1", why
    if getattr(zero, "mics_shard_size", -1) > 0:
        yield "zero_optimization.mics_shard_size", why
    compile_config = getattr(config, "compile_config", None)
    if getattr(compile_config, "deepcompile", False):
        yield "compile.deepcompile", why
    if any(p.dtype != torch.bfloat16 for g in engine.basic_optimizer.param_groups for p in g["params"]):
        yield "a parameter that is not bf16", 'with "bf16": {"enabled": true} DeepSpeed casts all parameters itself'
