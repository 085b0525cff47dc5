"""Hugging Face's Trainer and Accelerate, the real ones, on a tiny Llama."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flashdist import FlashAdamW, FlashLion, cast_model, enable_gradient_release
from flashdist.integrations.transformers import optimizer_cls_and_kwargs, use_flash_optimizer
from tests.support.backends import assert_same

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")


def tiny_llama():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return cast_model(transformers.LlamaForCausalLM(config))


def data():
    tokens = torch.randint(64, (16, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": t, "labels": t} for t in tokens]


def arguments(folder, **more):
    given = {
        "max_steps": 6, "save_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "weight_decay": 0.1,
        "lr_scheduler_type": "linear", "warmup_steps": 2, "adam_beta2": 0.95, "use_cpu": True, "report_to": [],
        "disable_tqdm": True, "logging_strategy": "no", "dataloader_pin_memory": False, **more,
    }  # fmt: skip
    return transformers.TrainingArguments(output_dir=str(folder), **given)


# The libraries' own deprecation warnings are not what is tested here.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _one_state_each():
    """Accelerate keeps one state for the process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_trainer_saves_and_resumes(tmp_path):
    """A run that is resumed ends with the bits of the unbroken one."""
    args = arguments(tmp_path / "a")
    first = transformers.Trainer(
        tiny_llama(), args, train_dataset=data(), optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args)
    )
    first.train()
    unbroken = first.optimizer.optimizer
    assert type(unbroken) is FlashAdamW
    assert [g["weight_decay"] for g in unbroken.param_groups] == [0.1, 0.0]
    assert all(g["betas"] == (0.9, 0.95) for g in unbroken.param_groups)
    matrix = first.model.model.layers[0].mlp.up_proj.weight
    assert unbroken.state[matrix]["exp_avg"].dtype == torch.int8
    assert int(unbroken.state[matrix]["step"]) == 6

    second = use_flash_optimizer(transformers.Trainer(tiny_llama(), arguments(tmp_path / "b"), train_dataset=data()))
    second.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert_same(second.optimizer.optimizer, unbroken)
    saved = torch.load(tmp_path / "b" / "checkpoint-6" / "optimizer.pt", weights_only=True)
    weights = sum(p.numel() for p in first.model.parameters())
    state = [t for entry in saved["state"].values() for t in entry.values()]
    assert sum(t.numel() * t.element_size() for t in state) < 4 * weights


def test_gradient_release_in_trainer(tmp_path):
    """Trainer clips by default, which release refuses; without clipping it trains."""
    for clip in (1.0, 0.0):
        args = arguments(tmp_path, max_steps=2, save_strategy="no", max_grad_norm=clip)
        trainer = use_flash_optimizer(transformers.Trainer(tiny_llama(), args, train_dataset=data()))
        optimizer = trainer.create_optimizer()
        with enable_gradient_release(trainer.model, optimizer):
            if clip:
                with pytest.raises(RuntimeError, match="cannot be clipped"):
                    trainer.train()
            else:
                trainer.train()
    assert {int(s["step"]) for s in optimizer.state.values()} == {2}


def test_accelerate_prepares_and_saves(tmp_path):
    def run(steps, resume=False):
        accelerator = accelerate.Accelerator(cpu=True)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).bfloat16()
        opt = FlashAdamW(model.parameters(), lr=1e-2)
        model, prepared = accelerator.prepare(model, opt)
        if resume:
            accelerator.load_state(str(tmp_path / "state"))
        for t in steps:
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(t)).bfloat16()
            accelerator.backward(model(x).float().square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            prepared.step()
            prepared.zero_grad()
            if t == 2 and not resume:
                accelerator.save_state(str(tmp_path / "state"))
        return opt

    unbroken = run(range(5))
    assert_same(run(range(3, 5), resume=True), unbroken)


def test_arguments(tmp_path):
    args = arguments(tmp_path)
    assert optimizer_cls_and_kwargs(args, FlashLion, quantize=False) == (FlashLion, {"lr": 1e-2, "quantize": False})
    assert optimizer_cls_and_kwargs(args, lr=1.0)[1] == {"lr": 1.0, "betas": (0.9, 0.95), "eps": 1e-8}
    with pytest.raises(TypeError, match="flashdist's optimizers"):
        optimizer_cls_and_kwargs(args, torch.optim.AdamW)
    with pytest.raises(ValueError, match="TrainingArguments"):
        optimizer_cls_and_kwargs(args, weight_decay=0.1)
    trainer = transformers.Trainer(tiny_llama().float(), args, train_dataset=data())
    with pytest.warns(UserWarning, match="fp32 matrices"):
        use_flash_optimizer(trainer)
    trainer.create_optimizer()
    with pytest.raises(RuntimeError, match="has an optimizer already"):
        use_flash_optimizer(trainer)
