"""Bytes on the disk, and memory while saving and loading."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from flashdist import FlashAdamW, checkpoint
from tests.support.ranks import run_ranks

MIB = 1 << 20


def folder_bytes(path):
    return sum(entry.stat().st_size for entry in os.scandir(path))


class Blocks(nn.Module):
    """GPT-2's shapes: 12 tensors a block, most of them small."""

    def __init__(self, width, blocks, vocabulary):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width),
                nn.Linear(width, 4 * width), nn.Linear(4 * width, width),
            )
            for _ in range(blocks)
        )  # fmt: skip


def save_worker(rank, world_size, path, width, blocks, vocabulary):
    with torch.device("meta"):
        model = Blocks(width, blocks, vocabulary).to(torch.bfloat16)
    if world_size > 1:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    opt = FlashAdamW(model.parameters())
    checkpoint.save(path, model, opt)
    entries = sum(len(opt.state[p]) + 1 for p in model.parameters())
    return sum(p.numel() for p in model.parameters()), entries


@pytest.mark.parametrize("size", [1, 4])
def test_overhead_is_small_however_small_the_tensors(tmp_path, size):
    numel, entries = run_ranks(save_worker, size, str(tmp_path / "c"), 64, 6, 1000)[0]
    raw = sum(checkpoint.verify(tmp_path / "c").bytes_by_kind.values())
    assert folder_bytes(tmp_path / "c") <= raw + 2048 * entries * size
    assert raw >= 5.18 * numel


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
def test_bytes_per_parameter_above_100_million(tmp_path, size):
    numel, _ = run_ranks(save_worker, size, str(tmp_path / "c"), 768, 12, 30000, timeout=170)[0]
    assert numel > 100e6
    per_parameter = folder_bytes(tmp_path / "c") / numel
    print(f"{numel / 1e6:.1f} M parameters from {size} ranks: {per_parameter:.4f} B/param")
    assert per_parameter <= 5.25


# What a process holds beyond its steady state, at the worst moment: memory of its own, not pages of files.
MEMORY = """
    import sys, threading, time
    import torch
    from torch import nn
    from flashdist import FlashAdamW, checkpoint

    def own_memory():
        for line in open("/proc/self/status"):
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024

    class Watch(threading.Thread):
        def __enter__(self):
            self.base = self.peak = own_memory()
            self.on = True
            self.start()
            return self
        def run(self):
            while self.on:
                self.peak = max(self.peak, own_memory())
                time.sleep(0.001)
        def __exit__(self, *_):
            self.on = False
            self.join()
            self.extra = (max(self.peak, own_memory()) - self.base) / 2**20

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(12)]).to(torch.bfloat16)
    def touched(opt):
        opt.state_dict()
        for state in opt.state.values():
            for t in state.values():
                t.fill_(1)
        return opt

    opt = touched(FlashAdamW(model.parameters()))
    small = nn.Linear(4, 4).to(torch.bfloat16)
    checkpoint.save(sys.argv[1] + "-warm", small, FlashAdamW(small.parameters()))
    checkpoint.load(sys.argv[1] + "-warm", small, FlashAdamW(small.parameters()))
    with Watch() as save:
        checkpoint.save(sys.argv[1], model, opt)
    with Watch() as load:
        checkpoint.load(sys.argv[1], model, opt)
    other = touched(FlashAdamW(model.parameters(), master_weight_bits=32))
    with Watch() as convert:
        checkpoint.load(sys.argv[1], model, other)
    with Watch() as stage:
        handle = checkpoint.async_save(sys.argv[1], model, opt, overwrite=True)
        handle.result()
    print(save.extra, load.extra, convert.extra, stage.extra)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
def test_case_15_memory_stays_at_about_one_tensor_above_steady_state(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path / "c")],
        capture_output=True, text=True, timeout=170, check=False, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    save, load, convert, stage = map(float, run.stdout.split())
    tensor = 2048 * 2048 * 2 / MIB  # the largest: a weight, 8 MiB
    blocks = 32  # buffers of the reader and the writer
    shard = 12 * 2048 * 2048 * 5.1875 / MIB
    assert save <= tensor + blocks, f"save: {save} MiB"
    assert load <= tensor + blocks, f"load: {load} MiB"
    # A conversion has the weight and correction read, and their fp32 join, of one tensor at a time.
    assert convert <= 6 * tensor + blocks, f"converting load: {convert} MiB"
    assert stage <= shard + tensor + blocks, f"async_save: {stage} MiB"
    assert stage >= 0.5 * shard, "not a copy of the shard"
