"""A DeepSpeed JSON beside a launcher's config: what is derived, what is refused, and how that is said."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pretrain
import pytest
from config import UserError
from deepspeed_settings import Asked, settle

from tests.support.pretraining import overrides

CONFIGS = Path(__file__).parents[2] / "configs"
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "master_weight_bits": 24}
ASKED = Asked(2, 12, 2, 3, 1.0, "flash_adamw", SETTINGS)
BARE = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}


def settled(tmp_path, tree, asked=ASKED):
    path = tmp_path / "ds.json"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return settle(path, asked)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_jsons_of_the_repository_are_filled_in(stage):
    found = settle(CONFIGS / "deepspeed" / f"zero{stage}.json", ASKED)
    numbers = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    assert {key: found.config[key] for key in numbers} == numbers
    assert found.config["gradient_clipping"] == 1.0
    assert (found.stage, found.more) == (stage, {})
    assert "optimizer" not in found.config
    assert "auto" not in json.dumps(found.config)


def test_what_is_missing_is_derived_and_what_agrees_is_taken(tmp_path):
    params = {"lr": 0.001, "betas": [0.9, 0.95], "weight_decay": 0.1, "eps": "auto", "decouple_lr": True}
    agreeing = {"train_batch_size": 12, "gradient_accumulation_steps": 3, "gradient_clipping": 1}
    found = settled(tmp_path, {**BARE, **agreeing, "optimizer": {"type": "FlashAdamW", "params": params}})
    assert found.more == {"decouple_lr": True}
    assert found.config["train_micro_batch_size_per_gpu"] == 2
    unclipped = Asked(2, 12, 2, 3, math.inf, "flash_adamw", SETTINGS)
    assert settled(tmp_path, BARE, unclipped).config["gradient_clipping"] == 0.0
    assert settled(tmp_path, {**BARE, "fp16": {"enabled": False}}).stage == 2


def zero(**more):
    return {**BARE, "zero_optimization": {"stage": 2, **more}}


def optimizer(kind, **params):
    return {**BARE, "optimizer": {"type": kind, "params": params}}


MISTAKES = [
    ("{", "is no valid JSON"),
    ("[]", "must hold a JSON object"),
    ('{"bf16": {}, "bf16": {}}', "'bf16' is written twice"),
    ({**BARE, "bf16": {"enabled": False}}, 'set "bf16": {"enabled": true}'),
    ({"zero_optimization": {"stage": 2}}, 'set "bf16": {"enabled": true}'),
    ({**BARE, "fp16": {"enabled": True}}, '"fp16" cannot be used here: set "bf16"'),
    ({**BARE, "scheduler": {"type": "WarmupLR"}}, '"scheduler" cannot be used here: leave it out'),
    ({**BARE, "elasticity": {"enabled": True}}, '"elasticity" cannot be used here'),
    ({**BARE, "gradient_cliping": 1.0}, "did you mean 'gradient_clipping'?"),
    ({"bf16": {"enabled": True}}, '"zero_optimization" needs a "stage" from 0 to 3, got None'),
    (zero(stage=4), "got 4"),
    (zero(reduce_bucket_size="auto"), "zero_optimization.reduce_bucket_size is"),
    (zero(offload_optimizer={"device": "cpu"}), "zero_optimization.offload_optimizer (cpu) cannot be used"),
    (zero(offload_param={"device": "nvme"}), "zero_optimization.offload_param (nvme) cannot be used"),
    ({**BARE, "train_batch_size": 16}, '"train_batch_size" is 16, but train.batch is 12'),
    ({**BARE, "gradient_accumulation_steps": True}, "is True, but train.batch and train.micro_batch give 3"),
    ({**BARE, "train_micro_batch_size_per_gpu": 4}, "is 4, but train.micro_batch is 2"),
    ({**BARE, "gradient_clipping": 0.5}, '"gradient_clipping" is 0.5, but train.max_norm gives 1'),
    (optimizer("AdamW"), "optimizer.type 'AdamW' is none of FlashAdamW"),
    (optimizer("FlashLion"), "set optimizer.name=flash_lion, or leave"),
    (optimizer("FlashAdamW", lr=1e-4), "optimizer.params.lr is 0.0001, but optimizer.lr is 0.001"),
    (optimizer("FlashAdamW", betas=[0.9, 0.999]), "optimizer.params.betas is [0.9, 0.999], but"),
    ({**BARE, "optimizer": "FlashAdamW"}, "optimizer must be an object"),
]


@pytest.mark.parametrize(("tree", "message"), MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_one_line(tmp_path, tree, message):
    with pytest.raises(UserError) as caught:
        settled(tmp_path, tree)
    text = str(caught.value)
    assert message in text
    assert text.startswith(f"parallel.deepspeed_config {tmp_path / 'ds.json'}")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs parallel.deepspeed_config: a JSON such as configs/deepspeed/zero2.json"),
        (["parallel.deepspeed_config=nowhere.json"], "nowhere.json cannot be read: No such file"),
        (["parallel.deepspeed_config={zero2}", "optimizer.name=torch_adamw"], "not optimizer.name=torch_adamw"),
        (["parallel.deepspeed_config={zero3}", "train.compile=true"], "train.compile=true has not been tested"),
        (
            ["parallel.deepspeed_config={zero2}", "parallel.strategy=ddp"],
            "deepspeed_config is given, but strategy is ddp",
        ),
        (["parallel.deepspeed_config={zero2}", "train.batch=7"], "train.batch=7 is no multiple of 1 ranks"),
    ],
)
def test_the_script_says_it_and_ends_with_exit_code_2(tmp_path, capsys, arguments, message):
    arguments = [a.format(**{f"zero{n}": CONFIGS / "deepspeed" / f"zero{n}.json" for n in (2, 3)}) for a in arguments]
    (tmp_path / "config.yaml").touch()
    given = overrides(tmp_path, f"run.folder={tmp_path / 'run'}", "parallel.strategy=deepspeed", *arguments)
    assert pretrain.main([str(tmp_path / "config.yaml"), *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
