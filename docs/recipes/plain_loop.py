"""A plain PyTorch loop: bf16 weights, a schedule, clipping, a checkpoint every ten steps.

    python docs/recipes/plain_loop.py

Started again it goes on from its last checkpoint: the losses are those of a run that was never stopped, bit for bit.
"""

from pathlib import Path

import torch
from torch import nn

from flashdist import FlashAdamW, cast_model
from flashdist.checkpoint import load, save

FOLDER = "runs/plain_loop"
STEPS, SAVE_EVERY = 20, 10
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 8))
model = cast_model(model.to(device))  # parameters are bf16 now, in place
opt = FlashAdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)

start = 0
if checkpoints := sorted(Path(FOLDER).glob("step-????")):
    start = load(checkpoints[-1], model, opt, scheduler=scheduler)["step"]
    print(f"resumed after step {start}")

losses = {}
for step in range(start + 1, STEPS + 1):
    batch = torch.Generator().manual_seed(step)  # a step's data depends on its number alone
    x = torch.randn(256, 64, generator=batch).to(device)
    y = x[:, :8].argmax(1)  # what is to be learned: which of the first eight numbers is the largest

    loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), y)
    loss.backward()
    opt.clip_grad_norm_(1.0)  # the factor is applied inside the step
    opt.step()
    scheduler.step()
    opt.zero_grad()

    losses[step] = loss.item()
    print(f"step {step} loss {losses[step]:.4f}")
    if step % SAVE_EVERY == 0:
        save(f"{FOLDER}/step-{step:04}", model, opt, scheduler=scheduler, extra={"step": step})

print(opt.memory_summary())
