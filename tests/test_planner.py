"""The plan against what was measured: storages of real optimizers, and the peak of an 8B run on a GPU."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashdist import FlashAdamW, FlashLion, FlashSGD
from flashdist.model_shapes import KNOWN, from_config, model_shape
from flashdist.planner import GIB, PEERS, Setting, peers, plan, smallest_change

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
SMALL = {
    "llama": {**KNOWN["llama-3.1-8b"], "hidden_size": 256, "intermediate_size": 700, "num_hidden_layers": 2,
              "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000},
    "gpt2": {**KNOWN["gpt2"], "n_embd": 96, "n_layer": 3, "vocab_size": 500},
    "qwen2": {**KNOWN["llama-3.2-1b"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 100,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300},
}  # fmt: skip


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize(
    ("name", "opt_class", "settings"),
    [("adamw", FlashAdamW, {}), ("lion", FlashLion, {}), ("sgd", FlashSGD, {"momentum": 0.9})],
)
def test_states_are_as_planned(kind, name, opt_class, settings):
    shape = from_config(SMALL[kind], kind)
    params = [torch.nn.Parameter(torch.zeros(s, dtype=torch.bfloat16)) for s in shape.shapes]
    opt = opt_class(params, lr=1e-3, **settings)
    opt.state_dict()
    measured = opt.memory_summary()
    planned = plan(shape, Setting(optimizer=name))
    for kind_of_bytes in ("weights", "corrections", "moments", "scales"):
        found = getattr(measured, kind_of_bytes)
        assert getattr(planned, kind_of_bytes) == pytest.approx(found, rel=0.03), kind_of_bytes
    assert planned.steady == pytest.approx(
        sum(measured.as_dict()[k] for k in ("weights", "corrections", "moments", "scales", "steps")), rel=0.03
    )


@pytest.mark.parametrize("kind", SMALL)
def test_shapes_are_those_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    config = dict(SMALL[kind])
    described = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(described)
    assert sorted(from_config(SMALL[kind], kind).shapes) == sorted(tuple(p.shape) for p in model.parameters())


def test_known_sizes():
    assert model_shape("llama-3.1-8b").parameters == 8_030_261_248
    assert model_shape("gpt2").parameters == 124_439_808
    assert model_shape("llama-3.2-1b").parameters == 1_235_814_400
    assert model_shape("smollm2-135m").parameters == 134_515_008
    assert model_shape("params=7e9").parameters == pytest.approx(7e9, rel=1e-6)
    assert model_shape("params=1.5B").parameters == pytest.approx(1.5e9, rel=1e-5)


@pytest.mark.parametrize(
    ("arm", "figure"),
    [
        ("flashdist", lambda m: plan(m, Setting())),
        ("flashdist_release", lambda m: plan(m, Setting(release=True))),
        ("torch_adamw_fp32", lambda m: peers(m, Setting())["torch AdamW, fp32"]),
        ("flashoptim", lambda m: peers(m, Setting())["flashoptim AdamW, 24 bits"]),
    ],
)
def test_the_peak_of_the_8b_run(arm, figure):
    rows = json.loads((RESULTS / "finetune-memory-h200.json").read_text())["rows"]
    measured = next(row for row in rows if row["arm"] == arm)
    planned = figure(model_shape("llama-3.1-8b"))
    assert planned.peak / GIB == pytest.approx(measured["peak_gib"], rel=0.10)
    assert planned.steady / GIB == pytest.approx(measured["steady_gib"], rel=0.03)


@pytest.mark.parametrize("gpus", [2, 3, 8])
def test_bytes_per_rank_follow_the_strategies(gpus):
    model = model_shape("llama-3.1-8b")
    n = model.parameters
    states = 3.1875
    expected = {
        "fsdp2": (2 + states) / gpus, "zero3": (2 + states) / gpus, "ddp": 2 + states,
        "ddp_zero1": 2 + states / gpus, "zero1": 2 + states / gpus, "zero2": 2 + states / gpus,
    }  # fmt: skip
    for strategy, per_parameter in expected.items():
        assert plan(model, Setting(gpus=gpus, strategy=strategy)).steady / n == pytest.approx(per_parameter, rel=0.001)


def test_the_smallest_change_is_enough_and_needed():
    model = model_shape("llama-3.1-8b")
    change, setting = smallest_change(model, Setting(gpu_memory=48))
    assert change == ["gradient release"]
    assert plan(model, setting).fits
    assert not plan(model, replace(setting, release=False)).fits
    change, setting = smallest_change(model, Setting(gpu_memory=80, checkpointing=False, micro_batch=4))
    assert change == ["activation checkpointing"]
    change, setting = smallest_change(model_shape("llama-3.1-70b"), Setting())
    assert plan(model_shape("llama-3.1-70b"), setting).fits
    assert change[-1] == f"{setting.gpus} GPUs with fsdp2"
    assert not plan(model_shape("llama-3.1-70b"), replace(setting, gpus=setting.gpus // 2)).fits
    assert smallest_change(model_shape("params=1e15"), Setting()) is None


def test_more_of_anything_never_takes_less():
    model = model_shape("llama-3.1-8b")
    peaks = [plan(model, Setting(seq=seq)).peak for seq in (1024, 2048, 4096, 8192)]
    assert peaks == sorted(peaks)
    peaks = [plan(model, Setting(gpus=g, strategy="fsdp2")).peak for g in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    assert math.isclose(plan(model, Setting(gpus=1, strategy="fsdp2")).peak, plan(model, Setting()).peak)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "lama-3.1-8b"], "Did you mean llama-3.1-8b?"),
        (["--model", "gpt2", "--strategy", "zero9"], "strategy must be one of"),
        (["--model", "gpt2", "--gpus", "0"], "gpus must be at least 1"),
        (["--model", "gpt2", "--gpus", "2", "--strategy", "single"], "take fsdp2 or ddp_zero1"),
        (
            ["--model", "gpt2", "--gpus", "2", "--strategy", "ddp", "--release"],
            "gradient release does not work with ddp",
        ),
        (["--model", "gpt2", "--gpu-memory", "-1"], "gpu_memory must be above 0"),
    ],
)
def test_bad_input_is_one_line(command, arguments, text):
    status, out, err = command("plan", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert text in err


def test_configurations_of_others(tmp_path, command):
    (tmp_path / "config.json").write_text("{")
    assert "is no JSON" in command("plan", "--model", tmp_path)[2]
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    assert "lacks 'intermediate_size'" in command("plan", "--model", tmp_path)[2]
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    assert command("plan", "--model", tmp_path)[0] == 2
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in command("plan", "--model", tmp_path / "empty")[2]
    (tmp_path / "config.json").write_text(json.dumps(SMALL["qwen2"]))
    status, out, _ = command("plan", "--model", tmp_path / "config.json", "--json", "--compare")
    found = json.loads(out)
    assert status == 0
    assert found["plan"]["fits"] is True
    assert set(found["compare"]) == set(PEERS)


def test_tables(command):
    status, out, _ = command("plan", "--model", "llama-3.1-8b", "--gpu-memory", "24", "--compare")
    assert status == 0
    assert "It does not fit" in out
    assert "smallest change" in out
    assert "flashoptim" in out
