"""How DeepSpeed comes to know the optimizers, what it is refused, and what happens when its internals have changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashdist
from tests.support.deepspeed_runs import (
    Net,
    config,
    deepspeed_on_this_group,
    make,
    packed_states,
    snapshot,
    train,
    weights,
)
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]

BEFORE_DEEPSPEED = """
import sys
import torch
import flashdist
from flashdist.integrations import deepspeed as ours
assert not any(name.split(".")[0] == "deepspeed" for name in sys.modules)
assert torch.optim.FlashAdamW is flashdist.FlashAdamW
import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
assert not any(type(finder).__name__ == "_AfterImport" for finder in sys.meta_path)
assert flashdist.FlashLion in ZERO_SUPPORTED_OPTIMIZERS
changed = [name for name in ours.SIGNATURES if hasattr(getattr(DeepSpeedEngine, name), "_flashdist_original")]
assert changed == list(ours.SIGNATURES), changed
before = dict(vars(DeepSpeedEngine))
ours.install()
assert all(before[name] is getattr(DeepSpeedEngine, name) for name in ours.SIGNATURES)
ours.uninstall()
assert not hasattr(torch.optim, "FlashAdamW")
assert flashdist.FlashLion not in ZERO_SUPPORTED_OPTIMIZERS
assert all(getattr(DeepSpeedEngine, n) is before[n]._flashdist_original for n in ours.SIGNATURES)
ours.install()
assert ours.changed_internals(DeepSpeedEngine) == []
assert torch.optim.FlashSGDW is flashdist.FlashSGDW
print("fine")
"""


def test_flashdist_before_deepspeed():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEFORE_DEEPSPEED], cwd=ROOT, capture_output=True, text=True, timeout=170
    )
    assert done.stdout.endswith("fine\n"), done.stdout[-2000:] + done.stderr[-2000:]


def refused(rank: int, world: int, settings: list[dict[str, Any]]) -> list[str]:
    messages = []
    with deepspeed_on_this_group() as deepspeed:
        for ds_config in settings:
            try:
                make(deepspeed, ds_config)
                messages.append("not refused")
            except ValueError as error:
                messages.append(str(error))
    return messages


REFUSED = {
    "zero_optimization.offload_optimizer (cpu)": config(2, zero={"offload_optimizer": {"device": "cpu"}}),
    "zero_optimization.offload_param (cpu)": config(3, zero={"offload_param": {"device": "cpu"}}),
    "zero_optimization.offload_param (nvme)": config(3, zero={"offload_param": {"device": "nvme", "nvme_path": "."}}),
    "zero_optimization.zenflow": config(2, zero={"zenflow": {"topk_ratio": 0.1}}),
    "compile.deepcompile": {**config(2), "compile": {"deepcompile": True}},
    "zero_optimization.elastic_checkpoint": config(2, zero={"elastic_checkpoint": True}),
    "data_types.grad_accum_dtype torch.float32 at ZeRO stage 0": config(0, data_types={"grad_accum_dtype": "fp32"}),
    "a model without bf16": {**config(1), "bf16": {"enabled": False}},
    "zero_optimization.zero_quantized_gradients": config(3, zero={"zero_quantized_gradients": True}),
    "zero_optimization.zero_hpz_partition_size above 1": config(3, zero={"zero_hpz_partition_size": 2}),
}


def test_refusals():
    for messages in run_ranks(refused, 2, list(REFUSED.values())):
        for expected, message in zip(REFUSED, messages, strict=True):
            assert message.startswith(f"FlashAdamW under DeepSpeed: {expected}"), (expected, message)


def refused_versions(rank: int, world: int) -> list[str]:
    """What cannot be configured on this machine, on an engine that is only described."""
    from types import SimpleNamespace

    with deepspeed_on_this_group():
        from flashdist.integrations import deepspeed_refusals as refusals

        opt = flashdist.FlashAdamW([nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))])
        zero = SimpleNamespace(offload_optimizer=None, offload_param=None, zenflow={"topk_ratio": 0.1})
        engine = SimpleNamespace(
            _config=SimpleNamespace(zero_config=zero), basic_optimizer=opt, has_moe_layers=True,
            pipeline_parallelism=True, zero_optimization_stage=lambda: 2, fp16_enabled=lambda: True,
            bfloat16_enabled=lambda: False, torch_autocast_enabled=lambda: True, super_offload=lambda: True,
            zero_elastic_checkpoint=lambda: False, get_data_types=lambda: (torch.float16, torch.float16),
        )  # fmt: skip
        found = [setting for setting, _ in refusals._reasons(engine)]
        real, refusals.version = refusals.version, lambda: (0, 18, 2)  # type: ignore[assignment]
        try:
            refusals.refuse(engine, opt, (0, 18, 3))
        except ValueError as error:
            found.append(str(error))
        finally:
            refusals.version = real
        return found


def test_refusals_by_description():
    (found,) = run_ranks(refused_versions, 1)
    text = " | ".join(found)
    for setting in ("fp16", "without bf16", "torch_autocast", "zenflow", "super_offload", "MoE", "PipelineModule"):
        assert setting in text
    assert "needs DeepSpeed 0.18.3 or newer, this is 0.18.2" in text


def instances(rank: int, world: int, stage: int) -> dict[str, Any]:
    """The JSON, a callable, an instance and zero.Init give the same training."""
    with deepspeed_on_this_group() as deepspeed:
        ds_config = config(stage, params={"lr": 3e-3}, gradient_clipping=0.5)
        by_json = make(deepspeed, ds_config)
        losses = train(by_json, 6)
        without = {k: v for k, v in ds_config.items() if k != "optimizer"}

        def build(groups: Any) -> flashdist.FlashAdamW:
            return flashdist.FlashAdamW(groups, lr=3e-3)

        out = {"instance": train(make(deepspeed, without, optimizer=build), 6) == losses}
        out["callable"] = train(make(deepspeed, without, optimizer=lambda groups: build), 6) == losses
        out["no fp32 copies"] = all(
            t.dtype != torch.float32 or t.numel() < 500 for s in by_json.basic_optimizer.state.values()
            for t in s.values()
        )  # fmt: skip
        if stage == 3:
            made = config(stage, params={"lr": 3e-3}, gradient_clipping=0.5)

            def net() -> nn.Module:
                with deepspeed.zero.Init(config_dict_or_path=made, dtype=torch.bfloat16):
                    return Net()

            engine = make(deepspeed, made, net)
            out["zero.Init trains"] = len(set(train(engine, 6))) == 6
            out["zero.Init aliases"] = bool(engine.basic_optimizer.partitions)
        return out


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_json_callable_instance_and_zero_init(stage):
    for found in run_ranks(instances, 2, stage):
        assert [what for what, holds in found.items() if not holds] == []


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(super().forward, x, use_reentrant=False)


def behaviour(rank: int, world: int, stage: int) -> dict[str, Any]:
    """Activation checkpointing, overflow, weights that change behind the optimizer, values read and set."""
    with deepspeed_on_this_group() as deepspeed:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        ds_config = config(stage, params={"lr": 3e-3}, gradient_clipping=0.5)
        ds_config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        out: dict[str, Any] = {}
        one, two = make(deepspeed, ds_config), make(deepspeed, ds_config, Checkpointed)
        out["activation checkpointing"] = train(one, 4) == train(two, 4)

        kept = packed_states(one) if stage else {}
        whole = weights(deepspeed, one)
        one.backward(one(torch.full((4, 64), float("inf")).bfloat16()).float().sum())
        one.step()
        out["overflow skipped"] = one.skipped_steps == 1 and all(
            torch.equal(whole[n], p) for n, p in weights(deepspeed, one).items()
        )
        if stage == 0:
            return out
        out["states as before"] = all(
            torch.equal(a[k], b[k]) for a, b in zip(kept, packed_states(one), strict=True) for k in a
        )
        before = snapshot(one)
        out["24 bits"] = not torch.equal(before["first.weight"]["fp32"], whole["first.weight"].float())
        out["near"] = all(
            ((s["fp32"] - whole[n].float()).abs() <= whole[n].float().abs() * 2.0**-8).all() for n, s in before.items()
        )

        p = one.module.first.weight
        value = torch.randn(96, 37)
        safe_set_full_fp32_param(p, value)
        safe_set_full_optimizer_state(p, value.abs(), "exp_avg_sq")
        after = snapshot(one)
        out["set"] = ((after["first.weight"]["fp32"] - value).abs() <= value.abs() * 2.0**-16).all().item()
        error = (after["first.weight"]["exp_avg_sq"].sqrt() - value.abs().sqrt()).abs().max()
        out["set moment"] = (error < 0.01).item()
        out["others stay"] = torch.equal(after["second.weight"]["fp32"], before["second.weight"]["fp32"])

        one.basic_optimizer.zero_grad()
        with torch.no_grad():
            for packed in one.basic_optimizer.states():
                for i in range(len(packed.segments)):
                    packed.weight_of(i).fill_(0.5)
        out["stale corrections dropped"] = all((s["fp32"] == 0.5).all().item() for s in snapshot(one).values())
        one.optimizer._restore_from_bit16_weights()
        out["corrections 0"] = all(
            not b.any() for p in one.basic_optimizer.states() for n, b in p.buffers.items() if n.startswith("error")
        )
        return out


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_behaviour(stage):
    for found in run_ranks(behaviour, 2, stage):
        assert [what for what, holds in found.items() if not holds] == []


def fallback(rank: int, world: int, stage: int) -> dict[str, Any]:
    """A release of DeepSpeed in which one of the changed methods has another signature."""
    import warnings

    with deepspeed_on_this_group() as deepspeed:
        from deepspeed.runtime.engine import DeepSpeedEngine

        original = DeepSpeedEngine._get_all_ckpt_names
        DeepSpeedEngine._get_all_ckpt_names = lambda self, path, tag, new_argument=None: None
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                engine = make(deepspeed, config(stage, params={"lr": 3e-3}))
            losses = train(engine, 30)
        finally:
            DeepSpeedEngine._get_all_ckpt_names = original
        messages = [str(w.message) for w in caught if "flashdist" in str(w.message)]
        return {"messages": messages, "losses": losses, "reference": train(make(deepspeed, config(
            stage, params={"lr": 3e-3})), 30)}  # fmt: skip


@pytest.mark.parametrize("stage", [2, 3])
def test_fallback_to_deepspeeds_clones(stage):
    for found in run_ranks(fallback, 2, stage):
        (message,) = found["messages"]
        assert "changed: _get_all_ckpt_names" in message
        assert "bytes a parameter more" in message
        losses, reference = torch.tensor(found["losses"]), torch.tensor(found["reference"])
        assert (losses - reference).abs().max() <= 0.02
