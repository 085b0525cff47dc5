"""Whether sharded training and its checkpoints have the bits of one process, on the ranks that are there.

    torchrun --nproc-per-node 4 -m benchmarks.sharded_bits --save FOLDER
    torchrun --nproc-per-node 2 -m benchmarks.sharded_bits --load FOLDER

--save trains the model of tests/support/odd_model.py for three steps under every strategy that this number of ranks
allows, compares each rank's tensors with those of one process, and saves. --load loads everything that is in the folder
under every strategy, compares, takes one more step and compares again. With two ranks or more it also shows gradient
release under FSDP2 and, on GPUs, one optimizer over two devices.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.sharded_speed import on_ranks
from flashdist import FlashAdamW, enable_gradient_release
from flashdist.sharding.local_shard import local
from tests.support.odd_model import STRATEGIES
from tests.support.resharding import EQUAL, NESTED, OWN, load_worker, save_worker

WAYS = (OWN, NESTED)


def strategies(ranks: int) -> list[str]:
    """Those that this number of ranks allows."""
    here = [
        s for s in STRATEGIES if s != "single" and (s not in ("hsdp", "fsdp2_tp") or (ranks >= 4 and ranks % 2 == 0))
    ]
    return here if ranks > 1 else ["single", "fsdp2"]


def save_all(folder: Path, device: str) -> dict[str, str]:
    """Per strategy: EQUAL, or the tensors that differ from one process's."""
    found = {}
    for strategy in strategies(dist.get_world_size()):
        path = folder / f"{strategy}-{dist.get_world_size()}"
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
        dist.barrier()
        wrong = save_worker(dist.get_rank(), dist.get_world_size(), strategy, str(path), device)
        found[f"{strategy} trains like one process"] = f"DIFFERS: {wrong[:5]}" if wrong else EQUAL
    return found


def load_all(folder: Path, device: str) -> dict[str, str]:
    """Per checkpoint, strategy and way: EQUAL, or what is wrong."""
    found = {}
    for path in sorted(folder.iterdir()):
        for strategy in strategies(dist.get_world_size()):
            outcomes = load_worker(dist.get_rank(), dist.get_world_size(), strategy, str(path), WAYS, device)
            for way, outcome in outcomes.items():
                found[f"{path.name} -> {strategy}-{dist.get_world_size()} ({way})"] = outcome
    return found


def release(device: torch.device) -> str:
    """Gradient release under FSDP2 against step(), bit for bit."""

    def trained(released: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = (
            nn.Sequential(nn.Embedding(37, 64), nn.Linear(64, 51), nn.Tanh(), nn.Linear(51, 7)).bfloat16().to(device)
        )
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for part in (model[1], model[3], model):
            fully_shard(part, mesh=mesh)
        opt = FlashAdamW(model.parameters(), lr=1e-2)
        if released:
            enable_gradient_release(model, opt)
        for t in range(4):
            generator = torch.Generator().manual_seed(10 * t + dist.get_rank())
            tokens = torch.randint(37, (6,), generator=generator).to(device)
            nn.functional.cross_entropy(model(tokens).float(), tokens % 7).backward()
            opt.step()
            opt.zero_grad()
        # In the order of the parameters: release makes the states in another order than step() does.
        return [local(t).detach() for p in model.parameters() for t in (p, *opt.state[p].values())]

    pairs = zip(trained(True), trained(False), strict=True)
    return (
        EQUAL if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs if a.dim()) else "DIFFERS"
    )


def two_devices() -> str:
    """CASE 24: one optimizer over layers on two GPUs of this process, against two optimizers."""

    def layers() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(130, 96), (33,), (64, 3, 7, 7), (5, 7)]
        made = [torch.randn(s, generator=generator).bfloat16() for s in shapes * 2]
        return [nn.Parameter(t.to(torch.device("cuda", i % 2))) for i, t in enumerate(made)]

    def steps(opts: list[FlashAdamW], params: list[nn.Parameter]) -> list[torch.Tensor]:
        for t in range(3):
            generator = torch.Generator().manual_seed(100 + t)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.device)
            for opt in opts:
                opt.step()
        return [p.detach().cpu() for p in params]

    one, other = layers(), layers()
    together = steps([FlashAdamW(one, lr=1e-2)], one)
    apart = steps([FlashAdamW(other[0::2], lr=1e-2), FlashAdamW(other[1::2], lr=1e-2)], other)
    return EQUAL if all(map(torch.equal, together, apart)) else "DIFFERS"


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; exit status 1 where anything differs on any rank."""
    p = argparse.ArgumentParser("benchmarks.sharded_bits", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--save", type=Path)
    which.add_argument("--load", type=Path)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--out", type=Path)
    args = p.parse_args(argv)
    wrong: list[str] = []

    def work(device: torch.device) -> None:
        found = save_all(args.save, args.device) if args.save else load_all(args.load, args.device)
        if dist.get_world_size() > 1:
            found["gradient release under FSDP2"] = release(device)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, found)
        merged = {what: next((r[what] for r in ranks if r[what] != EQUAL), EQUAL) for what in found}
        if device.type == "cuda" and torch.cuda.device_count() > 1 and dist.get_rank() == 0:
            merged["one optimizer over two devices"] = two_devices()
        wrong.extend(what for what, outcome in merged.items() if outcome != EQUAL)
        if dist.get_rank() == 0:
            print(json.dumps(merged, indent=1))
            if args.out:
                args.out.write_text(json.dumps(merged))

    on_ranks(args.device, work)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
