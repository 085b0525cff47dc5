"""Hugging Face's Trainer with a DeepSpeed configuration that names FlashAdamW."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.deepspeed_runs import deepspeed_on_this_group
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def trained(rank: int, world: int, stage: int, folder: str) -> dict[str, Any]:
    with deepspeed_on_this_group():
        from accelerate.state import AcceleratorState, PartialState
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        try:
            arguments = TrainingArguments(
                output_dir=folder, deepspeed=str(ROOT / f"configs/deepspeed/zero{stage}.json"), max_steps=12,
                per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=1, save_strategy="steps",
                save_steps=12, bf16=True, use_cpu=True, report_to=[], disable_tqdm=True, lr_scheduler_type="constant",
            )  # fmt: skip
            torch.manual_seed(0)
            model = LlamaForCausalLM(
                LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2)
            )  # fmt: skip
            rows = [
                {"input_ids": (torch.arange(16) + i) % 64, "labels": (torch.arange(16) + i) % 64} for i in range(96)
            ]
            trainer = Trainer(model=model, args=arguments, train_dataset=rows)
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            opt = trainer.model_wrapped.basic_optimizer
            found = {"losses": losses, "optimizer": type(opt).__name__, "partitions": len(opt.partitions)}
            return {**found, "lr": opt.param_groups[0]["lr"], "files": sorted(p.name for p in Path(folder).iterdir())}
        finally:
            AcceleratorState._reset_state(True)
            PartialState._reset_state()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_trainer(stage, tmp_path):
    for found in run_ranks(trained, 2, stage, str(tmp_path), timeout=170):
        assert found["losses"][-1] < 0.9 * found["losses"][0]
        assert found["optimizer"] == "FlashAdamW"
        assert found["partitions"] == 1
        assert found["lr"] == 3e-3
        assert found["files"] == ["checkpoint-12"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_configurations_name_the_optimizer_and_the_stage(stage):
    config = json.loads((ROOT / f"configs/deepspeed/zero{stage}.json").read_text(encoding="utf-8"))
    assert config["optimizer"]["type"] == "FlashAdamW"
    assert config["zero_optimization"]["stage"] == stage
    assert config["bf16"] == {"enabled": True}
