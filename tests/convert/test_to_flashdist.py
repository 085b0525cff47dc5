"""Checkpoints of torch.optim, flashoptim and bitsandbytes, converted to flashdist's."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flashdist import FlashAdamW, checkpoint
from flashdist.convert.run import Options, convert
from tests.checkpoint.test_contents import Net, make, train


def loaded(path, model_class=Net, **settings):
    torch.manual_seed(9)
    model = model_class().to(torch.bfloat16)
    opt = FlashAdamW(model.parameters(), lr=0.5, **settings)
    checkpoint.load(path, model, opt)
    return model, opt


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run with torch.optim.AdamW in fp32, and its file."""
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.8, 0.99), weight_decay=0.05)
    train(model, opt, 4)
    path = tmp_path_factory.mktemp("to_flashdist") / "adamw.pt"
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, path)
    return path, model, opt


def follows(found, exact):
    """Within the rounding of 8 bits: half of the widest step between codes, 1/127, and that of a bf16 scale."""
    return (found - exact).abs().max() <= 0.01 * exact.abs().max()


@pytest.mark.parametrize("bits", [24, 32])
def test_from_torch_adamw(reference, tmp_path, command, bits):
    path, model, opt = reference
    out = tmp_path / "c"
    status, said, err = command("convert", path, out, "--to", "flashdist", "--master-weight-bits", bits)
    assert (status, "4 tensors" in said) == (0, True), err
    found, found_opt = loaded(out, master_weight_bits=bits)
    dense = checkpoint.torch_state_dict(found_opt)["state"]
    for i, (p, q) in enumerate(zip(model.parameters(), found.parameters(), strict=True)):
        master = found_opt.master_weight(q)
        if bits == 32 or p.dim() == 1:
            assert torch.equal(master, p.detach())
        else:
            assert (master - p).abs().max() <= p.abs().max() * 2.0**-16
            assert not torch.equal(master, q.float())
        for key in ("exp_avg", "exp_avg_sq"):
            assert follows(dense[i][key], opt.state[p][key])
        assert dense[i]["step"] == 4
    group = found_opt.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-3, (0.8, 0.99), 0.05)
    train(found, found_opt, 1)


def test_there_and_back_again(tmp_path):
    """Weights and corrections come back as they were, moments within the rounding of one code of their group."""
    model, opt = make(steps=5)
    checkpoint.save(tmp_path / "c", model, opt)
    convert(tmp_path / "c", tmp_path / "a.pt", "torch-adamw")
    convert(tmp_path / "a.pt", tmp_path / "back", "flashdist")
    found, found_opt = loaded(tmp_path / "back")
    for p, q in zip(model.parameters(), found.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(opt.master_weight(p), found_opt.master_weight(q))
        assert opt.state[p].keys() == found_opt.state[q].keys()
        for key in ("step", "error"):
            assert torch.equal(found_opt.state[q][key], opt.state[p][key])
    before, after = checkpoint.torch_state_dict(opt)["state"], checkpoint.torch_state_dict(found_opt)["state"]
    for i, state in before.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert follows(after[i][key], state[key])
    description = checkpoint.verify(tmp_path / "back")
    assert description.bytes_by_kind == {
        k: v for k, v in checkpoint.verify(tmp_path / "c").bytes_by_kind.items() if k != "rng"
    }


def test_weights_of_their_own_file(reference, tmp_path):
    _, model, opt = reference
    torch.save(opt.state_dict(), tmp_path / "optimizer.pt")
    save_file({n: p.detach() for n, p in model.named_parameters()}, tmp_path / "w.safetensors")
    (tmp_path / "names.txt").write_text("\n".join(n for n, _ in model.named_parameters()))
    with pytest.raises(ValueError, match=r"holds no weights.*--weights"):
        convert(tmp_path / "optimizer.pt", tmp_path / "c", "flashdist")
    options = Options(weights=tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"safetensors do not keep the model's order.*--names"):
        convert(tmp_path / "optimizer.pt", tmp_path / "c", "flashdist", options=options)
    options = Options(weights=tmp_path / "w.safetensors", names=tmp_path / "names.txt")
    convert(tmp_path / "optimizer.pt", tmp_path / "c", "flashdist", options=options)
    assert len(checkpoint.verify(tmp_path / "c").tensors) == 3 + 2 * 6 + 4


class Stack(nn.Module):
    """Layers that shapes do not tell apart, in two groups, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))


def grouped(names_given, groups):
    torch.manual_seed(1)
    model = Stack()
    named = dict(model.named_parameters())
    chosen = [
        {"params": [(n, named[n]) if names_given else named[n] for n in group], "weight_decay": i}
        for i, group in enumerate(groups)
    ]
    opt = torch.optim.AdamW(chosen, lr=1e-2)
    train(model, opt, 1, seed=3)
    return model, opt


DECAY = ["layers.0.weight", "layers.1.weight", "layers.2.weight"]
REST = ["layers.0.bias", "layers.1.bias", "layers.2.bias"]


@pytest.mark.parametrize("groups", [[DECAY, REST], [DECAY[:2], REST]])
@pytest.mark.parametrize("by", ["order", "names", "option"])
def test_states_find_their_parameters_or_are_refused(tmp_path, groups, by):
    model, opt = grouped(by == "names", groups)
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "a.pt")
    options = Options()
    if by == "option":
        (tmp_path / "names.txt").write_text("\n".join(groups[0] + groups[1]) + "\n")
        options = Options(names=tmp_path / "names.txt")
    if by == "order" and groups[0] != DECAY:
        with pytest.raises(ValueError, match=r"more than one way.*--names"):
            convert(tmp_path / "a.pt", tmp_path / "c", "flashdist", options=options)
        return
    convert(tmp_path / "a.pt", tmp_path / "c", "flashdist", options=options)
    torch.manual_seed(5)
    other = Stack().bfloat16()
    if groups[0] != DECAY:
        other.layers[2].weight = nn.Parameter(torch.zeros(32, 32))  # it has no state, and stays as it was stored
    named = dict(other.named_parameters())
    found = FlashAdamW([{"params": [named[n] for n in g]} for g in groups])
    checkpoint.load(tmp_path / "c", other, found)
    exact = {n: opt.state[p]["exp_avg"] for n, p in model.named_parameters() if p in opt.state}
    states, order = checkpoint.torch_state_dict(found)["state"], groups[0] + groups[1]
    for name, p in model.named_parameters():
        torch.testing.assert_close(named[name].float(), p.detach(), rtol=2.0**-8, atol=0)
        if name in order:
            assert follows(states[order.index(name)]["exp_avg"], exact[name])


def flashoptim_file(path, compressed, bits):
    """What flashoptim 0.1.4 saves, and the values that its own kernels read from it."""
    torch.manual_seed(2)
    model = nn.Linear(45, 33).bfloat16()
    state, values = {}, {}
    for i, p in enumerate(model.parameters()):
        numel, groups = p.numel(), -(-p.numel() // 32)
        codes = [torch.randint(-127, 128, p.shape, dtype=torch.int8), torch.randint(256, p.shape, dtype=torch.uint8)]
        scales = [torch.rand(groups).half() * 1e-2, torch.rand(groups).half() * 1e-3]
        spread = [s.float().repeat_interleave(32)[:numel].view(p.shape) for s in scales]
        y, r = codes[0].float() / 127, codes[1].float() / 255
        dense = [y / (2 - y.abs()) * spread[0], (r * spread[1]).square()]
        errors = torch.randint(-127, 128, p.shape) if bits == 24 else torch.randint(-32767, 32768, p.shape)
        half_ulp = torch.exp2(torch.floor(torch.log2(p.detach().double().abs())) - 8)
        master = (p.double() + errors / (127 if bits == 24 else 32767) * half_ulp).float()
        state[i] = {"step": torch.tensor(7)}
        state[i]["error_bits"] = errors.bfloat16() if bits == 24 else errors.short().view(torch.bfloat16)
        for key, c, s, d in zip(("exp_avg", "exp_avg_sq"), codes, scales, dense, strict=True):
            if compressed:
                state[i] |= {f"{key}::quantized": c, f"{key}::scales": s.view(torch.bfloat16)}
            else:
                state[i][key] = d
        values[i] = (master.detach(), *dense)
    group = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "initial_lr": 4e-3,
             "master_bytewidth": bits // 8, "quantize": True, "params": [0, 1]}  # fmt: skip
    torch.save({"model": model.state_dict(), "optimizer": {"state": state, "param_groups": [group]}}, path)
    return model, values


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("bits", [24, 32])
def test_from_flashoptim(tmp_path, compressed, bits):
    model, values = flashoptim_file(tmp_path / "f.pt", compressed, bits)
    convert(tmp_path / "f.pt", tmp_path / "a.pt", "torch-adamw", "flashoptim")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    for i, name in enumerate(("weight", "bias")):
        master, m, v = values[i]
        torch.testing.assert_close(found["model"][name], master, rtol=2e-7, atol=0)
        assert not torch.equal(master, model.state_dict()[name].float())
        torch.testing.assert_close(found["optimizer"]["state"][i]["exp_avg"], m, rtol=2e-6, atol=1e-12)
        torch.testing.assert_close(found["optimizer"]["state"][i]["exp_avg_sq"], v, rtol=2e-6, atol=1e-20)
        assert found["optimizer"]["state"][i]["step"] == 7
    convert(tmp_path / "f.pt", tmp_path / "c", "flashdist", options=Options(master_weight_bits=bits))
    ours, opt = loaded(tmp_path / "c", lambda: nn.Linear(45, 33), master_weight_bits=bits)
    torch.testing.assert_close(ours.weight, model.weight, rtol=2.0**-7, atol=0)
    assert (opt.master_weight(ours.weight) - values[0][0]).abs().max() <= 2.0**-16 * values[0][0].abs().max()
    assert follows(checkpoint.torch_state_dict(opt)["state"][0]["exp_avg"], values[0][1])
    assert (opt.param_groups[0]["lr"], opt.param_groups[0]["initial_lr"]) == (2e-3, 4e-3)


@pytest.mark.parametrize("wrapped", [True, False])
def test_from_bitsandbytes(tmp_path, wrapped):
    torch.manual_seed(3)
    model = nn.Linear(100, 64)
    numel = model.weight.numel()
    tables = [torch.linspace(-1, 1, 256).pow(3), torch.linspace(0, 1, 256).square()]
    state, expected = {0: {"step": 5}, 1: {"step": 5, "state1": torch.randn(64), "state2": torch.rand(64)}}, []
    packed = {}
    for i, table in enumerate(tables, 1):
        codes, scales = torch.randint(256, (64, 100), dtype=torch.uint8), torch.rand(-(-numel // 256)) * 1e-3
        packed |= {f"state{i}": codes, f"qmap{i}": table, f"absmax{i}": scales}
        expected.append(table[codes.long()] * scales.repeat_interleave(256)[:numel].view(64, 100))
    state[0] |= {"__bnb_optimizer_quant_state__": packed} if wrapped else packed
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "alpha": 0.0, "params": [0, 1]}
    torch.save(
        {"state_dict": model.state_dict(), "optimizer": {"state": state, "param_groups": [group]}}, tmp_path / "b.pt"
    )
    convert(tmp_path / "b.pt", tmp_path / "a.pt", "torch-adamw")
    found = torch.load(tmp_path / "a.pt", weights_only=True)["optimizer"]["state"]
    for key, values, small in zip(("exp_avg", "exp_avg_sq"), expected, ("state1", "state2"), strict=True):
        assert torch.equal(found[0][key], values)
        assert torch.equal(found[1][key], state[1][small])
    convert(tmp_path / "b.pt", tmp_path / "c", "flashdist", "bitsandbytes")
    _, opt = loaded(tmp_path / "c", lambda: nn.Linear(100, 64))
    assert follows(checkpoint.torch_state_dict(opt)["state"][0]["exp_avg_sq"], expected[1])


# A run of 8 M parameters: 96 MB of torch.optim.AdamW's state and weights, 8 tensors.
MEMORY = """
    import sys, threading, time
    from pathlib import Path
    import torch
    from torch import nn
    from flashdist.convert.run import convert

    def own():
        text = open("/proc/self/status").read()
        return int(text.split("RssAnon:")[1].split()[0]) * 1024

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    opt = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, folder / "a.pt")
    del model, opt, p
    convert(folder / "a.pt", folder / "warm", "flashdist")
    before, peak, on = own(), [0], [True]
    def watch():
        while on[0]:
            peak[0] = max(peak[0], own())
            time.sleep(0.001)
    thread = threading.Thread(target=watch)
    thread.start()
    convert(folder / "a.pt", folder / "c", "flashdist")
    for to in ("torch-adamw", "hf", "safetensors-fp32"):
        convert(folder / "c", folder / to, to)
    on[0] = False
    thread.join()
    print((peak[0] - before) / 2**20, (folder / "torch-adamw").stat().st_size / 2**20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_that_of_a_tensor_or_two(tmp_path):
    code = [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path)]
    run = subprocess.run(code, capture_output=True, text=True, timeout=150, check=True)
    peak, size = map(float, run.stdout.split())
    print(f"peak {peak:.1f} MiB above the start, the checkpoint has {size:.1f} MiB")
    assert size > 95
    assert peak < 0.4 * size
