"""Accelerate: the optimizer goes through accelerator.prepare as any other.

    accelerate launch docs/recipes/accelerate_loop.py        # or: python docs/recipes/accelerate_loop.py

Started again it goes on from the last state that accelerator.save_state has written.
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from flashdist import FlashAdamW, cast_model

FOLDER = "runs/accelerate_loop"
STEPS, SAVE_EVERY = 20, 10
accelerator = Accelerator()  # without mixed_precision: the weights are bf16 themselves

torch.manual_seed(0)
model = cast_model(nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 8)))
opt = FlashAdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS * accelerator.num_processes)
model, opt, scheduler = accelerator.prepare(model, opt, scheduler)

start = 0
if states := sorted(Path(FOLDER).glob("step-????")):
    accelerator.load_state(str(states[-1]))
    start = int(states[-1].name.removeprefix("step-"))

losses = {}
for step in range(start + 1, STEPS + 1):
    batch = torch.Generator().manual_seed(step * accelerator.num_processes + accelerator.process_index)
    x = torch.randn(256, 64, generator=batch).to(accelerator.device)
    y = x[:, :8].argmax(1)

    loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    scheduler.step()
    opt.zero_grad()

    losses[step] = loss.item()
    accelerator.print(f"step {step} loss {losses[step]:.4f}")
    if step % SAVE_EVERY == 0:
        accelerator.save_state(f"{FOLDER}/step-{step:04}")
