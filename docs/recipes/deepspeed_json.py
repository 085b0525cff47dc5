"""DeepSpeed ZeRO-2: one line of the configuration names the optimizer.

    torchrun --nproc-per-node 2 docs/recipes/deepspeed_json.py        # or: deepspeed docs/recipes/deepspeed_json.py

No fp32 copy of the weights is made. Started again it goes on from DeepSpeed's own checkpoint.
"""

from pathlib import Path

import deepspeed
import torch
from torch import nn

import flashdist  # noqa: F401 - puts FlashAdamW where DeepSpeed looks for it

FOLDER = "runs/deepspeed_json"
STEPS, SAVE_EVERY = 20, 10
config = {
    "train_micro_batch_size_per_gpu": 128,
    "bf16": {"enabled": True},
    "optimizer": {"type": "FlashAdamW", "params": {"lr": 1e-2}},  # the line
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
    "steps_per_print": 1_000_000,
}

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 8))
engine, opt, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
rank, ranks = engine.global_rank, engine.world_size

start = 0
if Path(FOLDER, "latest").exists():
    _, client_state = engine.load_checkpoint(FOLDER)
    start = client_state["step"]

losses = {}
for step in range(start + 1, STEPS + 1):
    batch = torch.Generator().manual_seed(step)
    x = torch.randn(256, 64, generator=batch).chunk(ranks)[rank].to(engine.device)
    y = x[:, :8].argmax(1)

    loss = nn.functional.cross_entropy(engine(x.bfloat16()).float(), y)
    engine.backward(loss)
    engine.step()

    losses[step] = loss.item()
    if rank == 0:
        print(f"step {step} loss {losses[step]:.4f}")
    if step % SAVE_EVERY == 0:
        engine.save_checkpoint(FOLDER, tag=f"step-{step:04}", client_state={"step": step})

torch.distributed.destroy_process_group()
