"""flashdist checkpoints of any ranks and strategy, converted to other formats."""

from __future__ import annotations

import json
import zipfile

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from flashdist import FlashAdamW, FlashLion, cast_model, checkpoint
from flashdist.convert.from_flashdist import read_flashdist
from flashdist.convert.run import convert
from flashdist.convert.to_weights import write_hf
from tests.checkpoint.test_contents import Net, make
from tests.support.odd_model import build, fill, make_optimizer, step
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    model, opt = make()
    path = tmp_path_factory.mktemp("from_flashdist") / "c"
    checkpoint.save(path, model, opt)
    return path, model, opt


def test_fp32_are_the_master_weights(trained, tmp_path, command):
    path, model, opt = trained
    out = tmp_path / "w.safetensors"
    status, said, err = command("convert", path, out, "--to", "safetensors-fp32")
    assert (status, "4 tensors" in said) == (0, True), err
    found = load_file(out)
    assert sorted(found) == ["body.bias", "body.weight", "embedding.weight", "seen"]
    for name, p in model.named_parameters():
        assert torch.equal(found[name], opt.master_weight(p))
        assert not torch.equal(found[name], p.float())
    assert [file.name for file in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize("dtype", [None, "fp32", "bf16"])
def test_hf_weights(trained, tmp_path, command, dtype):
    path, model, opt = trained
    options = [] if dtype is None else ["--dtype", dtype]
    assert command("convert", "-q", path, tmp_path / "hf", "--to", "hf", *options)[0] == 0
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "head.weight" not in file.keys()  # noqa: SIM118 - no dict
        for name, p in model.named_parameters():
            assert torch.equal(file.get_tensor(name), opt.master_weight(p) if dtype == "fp32" else p)


def test_large_weights_are_divided(trained, tmp_path):
    path, model, _ = trained
    write_hf(read_flashdist(path), tmp_path, None, None, lambda _: None, max_file_bytes=4704)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    assert index["metadata"]["total_size"] == 8 + 2 * sum(p.numel() for p in model.parameters())
    for name, p in model.named_parameters():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], p)


def test_torch_adamw_takes_the_state(trained, tmp_path, command):
    path, model, opt = trained
    out = tmp_path / "adamw.pt"
    assert command("convert", path, out, "--to", "torch-adamw")[0] == 0
    assert zipfile.ZipFile(out).testzip() is None
    found = torch.load(out, weights_only=True)
    other = Net()
    assert sorted(found["model"]) == sorted(other.state_dict())
    assert found["model"]["head.weight"].data_ptr() == found["model"]["embedding.weight"].data_ptr()
    other.load_state_dict(found["model"])
    reference = torch.optim.AdamW(other.parameters(), lr=1.0)
    reference.load_state_dict(found["optimizer"])
    assert reference.param_groups[0]["lr"] == 1e-2
    dense = checkpoint.torch_state_dict(opt)["state"]
    for i, (p, q) in enumerate(zip(model.parameters(), other.parameters(), strict=True)):
        assert torch.equal(q, opt.master_weight(p))
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(reference.state[q][key], dense[i][key])
    names = found["optimizer"]["param_groups"][0]["param_names"]
    assert names == [name for name, _ in model.named_parameters()]
    for p in other.parameters():
        p.grad = torch.ones_like(p)
    reference.step()
    # All that torch promises of a file of its own: it can be mapped, and its entries are aligned.
    mapped = torch.load(out, weights_only=True, mmap=True)["model"]
    assert all(t.data_ptr() % 64 == 0 for t in mapped.values() if t.numel())


def test_the_order_is_that_of_the_groups(tmp_path):
    model = Net(tied=False).bfloat16()
    groups = [{"params": [model.body.bias], "weight_decay": 0.0}, {"params": [model.head.weight, model.body.weight]}]
    opt = FlashAdamW(groups, lr=1e-2)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    checkpoint.save(tmp_path / "c", model, opt)
    convert(tmp_path / "c", tmp_path / "a.pt", "torch-adamw")
    found = torch.load(tmp_path / "a.pt", weights_only=True)["optimizer"]
    assert [g["param_names"] for g in found["param_groups"]] == [["body.bias"], ["head.weight", "body.weight"]]
    assert [g["weight_decay"] for g in found["param_groups"]] == [0.0, 0.01]
    assert [tuple(found["state"][i]["exp_avg"].shape) for i in range(3)] == [(48,), (20, 48), (48, 48)]


def sharded(rank, world_size, strategy, path):
    model = build(strategy, world_size)
    opt = make_optimizer(model, strategy)
    fill(model, 0)
    for seed in range(2):
        step(model, opt, seed)
    checkpoint.save(path, model, opt)
    checkpoint.export_weights(path + ".safetensors", model, opt)


@pytest.mark.parametrize(("strategy", "size"), [("fsdp2", 3), ("ddp_zero1", 3)])
def test_pieces_of_any_strategy_are_joined(tmp_path, strategy, size):
    path = tmp_path / "c"
    run_ranks(sharded, size, strategy, str(path))
    assert checkpoint.verify(path).world_size == size
    convert(path, tmp_path / "w.safetensors", "safetensors-fp32")
    convert(path, tmp_path / "adamw.pt", "torch-adamw")
    found, expected = load_file(tmp_path / "w.safetensors"), load_file(tmp_path / "c.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], t) for name, t in expected.items())
    model = build("single", 1)
    opt = make_optimizer(model, "single")
    checkpoint.load(path, model, opt)
    states, names = checkpoint.torch_state_dict(opt)["state"], {p: n for n, p in model.named_parameters()}
    saved = torch.load(tmp_path / "adamw.pt", weights_only=True)["optimizer"]
    by_name = {
        n: saved["state"].get(i)
        for g in saved["param_groups"]
        for i, n in zip(g["params"], g["param_names"], strict=True)
    }
    compared = 0
    for i, p in enumerate(p for g in opt.param_groups for p in g["params"]):
        state = by_name[names[p]]
        if i in states and p.numel():
            assert state is not None
            assert all(torch.equal(state[key], states[i][key]) for key in ("exp_avg", "exp_avg_sq", "step"))
            compared += 1
    assert compared > 5


def test_amsgrad_is_not_dropped_silently(tmp_path):
    model, opt = make(opt_class=torch.optim.AdamW, amsgrad=True)
    checkpoint.save(tmp_path / "c", model, opt)
    with pytest.raises(ValueError, match="is of AdamW with amsgrad=True"):
        convert(tmp_path / "c", tmp_path / "a.pt", "torch-adamw")


def test_other_optimizers_give_their_weights_alone(tmp_path, command):
    model, opt = make(opt_class=FlashLion)
    checkpoint.save(tmp_path / "c", model, opt)
    status, _, err = command("convert", tmp_path / "c", tmp_path / "a.pt", "--to", "torch-adamw")
    assert (status, err.count("\n")) == (2, 1), err
    assert "is of Lion" in err
    assert command("convert", "-q", tmp_path / "c", tmp_path / "w.safetensors", "--to", "safetensors-fp32")[0] == 0
    found = load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(found[name], opt.master_weight(p)) for name, p in model.named_parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_transformers_loads_it_and_says_the_same(tmp_path, command, tied, dtype):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, max_position_embeddings=64, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    cast_model(model)
    opt = FlashAdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(60, (2, 12))
    for _ in range(2):
        model(tokens, labels=tokens).loss.backward()
        opt.step()
        opt.zero_grad()
    checkpoint.save(tmp_path / "c", model, opt)
    folder = tmp_path / "config"
    config.save_pretrained(folder)
    if tied:  # what older or hand-written ones leave out
        settings = json.loads((folder / "config.json").read_text())
        settings.pop("tie_word_embeddings", None)
        (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    status, _, err = command(
        "convert", "-q", tmp_path / "c", tmp_path / "hf", "--to", "hf", "--config", folder, "--dtype", dtype
    )
    assert status == 0, err
    assert sorted(f.name for f in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    kind = transformers.AutoModelForCausalLM
    loaded, info = kind.from_pretrained(tmp_path / "hf", output_loading_info=True, dtype="auto")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    if dtype == "bf16":
        assert loaded.dtype == torch.bfloat16
        assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)
        answers = [m.generate(tokens[:1], max_new_tokens=5, do_sample=False) for m in (loaded, model)]
        assert torch.equal(*answers)
    else:
        assert loaded.dtype == torch.float32
        assert all(
            torch.equal(q, opt.master_weight(p)) for p, q in zip(model.parameters(), loaded.parameters(), strict=True)
        )
    assert isinstance(loaded, nn.Module)
