"""Lightning: precision="bf16-true" makes the weights bf16, configure_optimizers returns FlashAdamW.

    python docs/recipes/lightning_module.py

Started again it goes on from Lightning's own checkpoint.
"""

from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flashdist import FlashAdamW

FOLDER = "runs/lightning_module"
STEPS = 20
losses = {}


class Classifier(lightning.LightningModule):
    """Which of the first eight numbers of an input is the largest."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 8))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x).float(), y)
        losses[self.global_step + 1] = loss.item()
        return loss

    def configure_optimizers(self):
        opt = FlashAdamW(self.parameters(), lr=1e-2)  # called when the weights are bf16 already
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


lightning.seed_everything(0, verbose=False)
x = torch.randn(256 * STEPS // 2, 64)  # two epochs in STEPS steps
data = DataLoader(TensorDataset(x.bfloat16(), x[:, :8].argmax(1)), batch_size=256)
trainer = lightning.Trainer(
    max_steps=STEPS,
    precision="bf16-true",
    gradient_clip_val=1.0,
    callbacks=[ModelCheckpoint(FOLDER, filename="{step:04d}", every_n_train_steps=STEPS // 2, save_top_k=-1)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Classifier()
checkpoints = sorted(map(str, Path(FOLDER).glob("*.ckpt")))
trainer.fit(module, data, ckpt_path=checkpoints[-1] if checkpoints else None)
opt = trainer.optimizers[0]
for step, loss in losses.items():
    print(f"step {step} loss {loss:.4f}")
