"""Sharding, offloading and checkpoints on a GPU with NCCL, as far as one rank shows them.

Without a GPU the same tests run on the CPU over gloo, so that they stay in order.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flashdist import FlashAdamW, FlashOptimizer, cast_model, checkpoint, enable_gradient_release
from flashdist.sharding.replicated import shard_states
from tests.support.backends import BF16, assert_same_bits
from tests.support.odd_model import digests

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
POLICY = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
MIB = 2**20
WIDTH = 4099 if DEVICE.type == "cuda" else 259


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo"
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    """Odd sizes; on a GPU two matrices of millions of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(503, 264)
        self.inner = nn.Linear(264, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 503)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.gelu(self.norm(self.inner(self.table(tokens)))))


def build(strategy: str = "plain", offload: bool = False, seed: int = 0, **arguments: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model: nn.Module = cast_model(Net()) if strategy == "plain" else Net().to(BF16)
    if not offload:
        model = model.to(DEVICE)
    if strategy == "fsdp2":
        mesh = init_device_mesh(DEVICE.type, (1,))
        more = {"offload_policy": CPUOffloadPolicy(pin_memory=DEVICE.type == "cuda")} if offload else {}
        for part in (model.inner, model):
            fully_shard(part, mesh=mesh, mp_policy=POLICY, **more)
    opt = FlashAdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **arguments})
    return model, opt


def backward(model: nn.Module, t: int) -> float:
    generator = torch.Generator().manual_seed(t)
    tokens = torch.randint(503, (64,), generator=generator).to(DEVICE)
    loss = F.cross_entropy(model(tokens).float(), (tokens * 7) % 503)
    loss.backward()
    return loss.item()


def local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def plain_twin(model: nn.Module) -> list[nn.Parameter]:
    """Copies of a rank's shards, where they lie."""
    return [nn.Parameter(local(p.detach()).clone()) for p in model.parameters()]


def same_bits_as_plain(model: nn.Module, opt: FlashOptimizer, twin: list[nn.Parameter], plain: FlashOptimizer) -> None:
    for (name, p), q in zip(model.named_parameters(), twin, strict=True):
        assert_same_bits(local(p.detach()), q.detach(), name)
        assert opt.state[p].keys() == plain.state[q].keys()
        for key, value in plain.state[q].items():
            assert_same_bits(local(opt.state[p][key]), value, f"{name}.{key}")


@pytest.mark.parametrize("offload", [False, True], ids=["on the GPU", "offloaded"])
def test_fsdp2_steps_have_the_bits_of_plain_ones(offload: bool):
    """With CPUOffloadPolicy shards, gradients and states lie on the host, where the step is the eager one."""
    model, opt = build("fsdp2", offload)
    twin = plain_twin(model)
    plain = FlashAdamW(twin, lr=1e-2, weight_decay=0.1)
    losses = []
    for t in range(6):
        losses.append(backward(model, t % 2))
        for p, q in zip(model.parameters(), twin, strict=True):
            assert p.grad is not None
            assert p.grad.device.type == ("cpu" if offload else DEVICE.type)
            q.grad = local(p.grad).clone()
        for one in (opt, plain):
            one.clip_grad_norm_(0.5)
            one.step()
            one.zero_grad()
        same_bits_as_plain(model, opt, twin, plain)
    assert losses[-1] < 0.8 * losses[0], losses
    if offload:
        assert {local(v).device.type for state in opt.state.values() for v in state.values()} == {"cpu"}


def test_an_offloaded_checkpoint_goes_on_on_the_gpu_and_back(tmp_path: Any):
    model, opt = build("fsdp2", offload=True)
    for t in range(3):
        backward(model, t)
        opt.step()
        opt.zero_grad()
    expected = digests(model, opt)
    checkpoint.save(tmp_path / "host", model, opt)
    on_gpu = build("fsdp2", seed=1)
    assert digests(*on_gpu) != expected
    checkpoint.load(tmp_path / "host", *on_gpu)
    assert digests(*on_gpu) == expected
    assert {local(v).device.type for state in on_gpu[1].state.values() for v in state.values()} <= {DEVICE.type, "cpu"}
    checkpoint.save(tmp_path / "gpu", *on_gpu)
    back = build("fsdp2", offload=True, seed=2)
    checkpoint.load(tmp_path / "gpu", *back)
    assert digests(*back) == expected
    assert backward(back[0], 3) == backward(model, 3)
    for one in (opt, back[1]):
        one.step()
    assert digests(*back) == digests(model, opt)


def test_zero_1_under_ddp_has_the_bits_of_plain_steps():
    model, opt = build()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    shard_states(opt)
    twin = plain_twin(model)
    plain = FlashAdamW(twin, lr=1e-2, weight_decay=0.1)
    for t in range(3):
        backward(wrapped, t)
        for p, q in zip(model.parameters(), twin, strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        for one in (opt, plain):
            one.clip_grad_norm_(0.5)
            one.step()
            one.zero_grad()
    for p, q in zip(model.parameters(), twin, strict=True):
        assert_same_bits(p.detach(), q.detach(), "weight")
        for key, value in plain.state[q].items():
            found = opt.state[p][key]  # 1-D ones are rows of one
            found = found.to_local() if hasattr(found, "to_local") else found
            assert_same_bits(found.reshape(value.shape), value, key)


@pytest.mark.parametrize("strategy", ["plain", "fsdp2"])
def test_release_has_the_bits_of_step(strategy: str):
    model, opt = build(strategy)
    twin, plain = build(strategy)
    with enable_gradient_release(model, opt):
        for t in range(4):
            released, kept = backward(model, t), backward(twin, t)
            assert released == kept
            assert all(p.grad is None for p in model.parameters())
            opt.step()
            plain.step()
            plain.zero_grad()
    assert digests(model, opt) == digests(twin, plain)


@pytest.mark.gpu
def test_liger_s_loss_with_release_under_fsdp2():
    """The fused loss writes the head's gradient in forward: release must take it in backward all the same."""
    liger = pytest.importorskip("liger_kernel.transformers.fused_linear_cross_entropy")
    head_loss = liger.LigerFusedLinearCrossEntropyLoss()

    class WithLoss(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            hidden = F.gelu(self.norm(self.inner(self.table(tokens))))
            return head_loss(self.head.weight, hidden, (tokens * 7) % 503, self.head.bias)

    def one(release: bool) -> tuple[dict[str, Any], list[float]]:
        torch.manual_seed(0)
        model = WithLoss().to(BF16).to(DEVICE)
        fully_shard(model, mesh=init_device_mesh(DEVICE.type, (1,)), mp_policy=POLICY)
        opt = FlashAdamW(model.parameters(), lr=1e-2)
        handle = enable_gradient_release(model, opt) if release else None
        losses = []
        for t in range(4):
            tokens = torch.randint(503, (64,), generator=torch.Generator().manual_seed(t % 2)).to(DEVICE)
            loss = model(tokens)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        found = digests(model, opt)
        if handle is not None:
            handle.remove()
        return found, losses

    released, stepped = one(True), one(False)
    assert released == stepped
    assert released[1][2] < released[1][0]


def test_case_10_checkpoints_cross_devices(tmp_path: Any):
    model, opt = build()
    backward(model, 0)
    opt.step()
    checkpoint.save(tmp_path / "c", model, opt)
    torch.manual_seed(3)
    other = cast_model(Net())
    on_cpu = FlashAdamW(other.parameters(), lr=1e-2)
    checkpoint.load(tmp_path / "c", other, on_cpu)
    assert digests(other, on_cpu) == digests(model, opt)


@pytest.mark.gpu
def test_memory_of_saving_and_loading_on_the_device(tmp_path: Any):
    """Save and load: one tensor above steady state; async_save: at most 64 MiB."""
    layers = [nn.Linear(4096, 4096, bias=False) for _ in range(6)]
    model = cast_model(nn.Sequential(*layers)).to(DEVICE)
    opt = FlashAdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    opt.zero_grad()
    tensor = 4096 * 4096 * 2
    extra: dict[str, float] = {}

    def measured(name: str, action: Any) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        extra[name] = torch.cuda.max_memory_allocated() - before

    measured("save", lambda: checkpoint.save(tmp_path / "c", model, opt))
    before = digests(model, opt)
    pending: list[Any] = []
    measured("async_save", lambda: pending.append(checkpoint.async_save(tmp_path / "d", model, opt)))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()  # what is saved is what there was
    opt.zero_grad()
    pending[0].result()
    assert digests(model, opt) != before
    measured("load", lambda: checkpoint.load(tmp_path / "d", model, opt))
    assert digests(model, opt) == before
    bounds = {"save": tensor, "load": tensor, "async_save": 64 * MIB}
    assert {k: v for k, v in extra.items() if v > bounds[k] + 2 * MIB} == {}, extra
