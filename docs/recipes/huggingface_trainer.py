"""Hugging Face's Trainer builds, schedules, saves and resumes FlashAdamW as its own optimizer.

    python docs/recipes/huggingface_trainer.py

Started again it goes on from Trainer's last checkpoint.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from flashdist import cast_model
from flashdist.integrations.transformers import use_flash_optimizer

FOLDER = "runs/huggingface_trainer"

# A small model with drawn weights. A real one: AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    bos_token_id=None,
    eos_token_id=None,
)
model = cast_model(LlamaForCausalLM(config))

# What is to be learned: to count upwards from any number.
rows = [(torch.arange(16) + start) % 64 for start in range(64)]
data = [{"input_ids": row, "labels": row} for row in rows]

arguments = TrainingArguments(
    output_dir=FOLDER,
    max_steps=20,
    save_steps=10,
    per_device_train_batch_size=16,
    learning_rate=1e-2,
    weight_decay=0.1,
    max_grad_norm=1.0,
    lr_scheduler_type="cosine",
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
)
trainer = use_flash_optimizer(Trainer(model, arguments, train_dataset=data))  # FlashAdamW, lr and betas of arguments
trainer.train(resume_from_checkpoint=get_last_checkpoint(FOLDER))

losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
opt = trainer.optimizer
