"""launch/finetune.py on a tiny model: it learns, resumes with the same bits, exports, and says what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import finetune
import finetune_model
import finetuning as one_run
import pytest
import torch
from config import UserError
from finetune_config import ModelSection, TrainSection
from metrics import read_metrics
from run_folder import RunFolder
from safetensors.torch import load_file

from flashdist import FlashAdamW, checkpoint
from flashdist.checkpoint.reading import Reader, read_plain
from tests.support import finetuning

CONFIGS = Path(__file__).parent.parent.parent / "configs" / "finetune"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model folder, a file of chats, and a config."""
    path = tmp_path_factory.mktemp("finetune")
    model = finetuning.folder(path / "model")
    data = finetuning.jsonl(path / "chat.jsonl", finetuning.questions(60))
    config = path / "config.yaml"
    config.write_text(
        f"""
model: {{source: {model}}}
data: {{train: {data}, sequence: 128, validation_share: 10}}
optimizer: {{lr: 0.01}}
train: {{steps: 6, batch: 4, warmup: 2, device: cpu}}
run: {{save_every: 3, keep_last: 2, eval_every: 3, export: fp32}}
"""
    )
    return path, config


def run(config, folder, *overrides):
    return finetune.main([str(config), f"run.folder={folder}", *overrides])


def test_it_learns_resumes_and_exports(inputs, tmp_path, capsys):
    _, config = inputs
    assert run(config, tmp_path / "a") == 0
    said = capsys.readouterr().out
    assert "memory, planned" in said
    assert "memory, measured" in said
    losses = [r["eval_loss"] for r in read_metrics(tmp_path / "a" / "metrics.jsonl") if "eval_loss" in r]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.5

    assert run(config, tmp_path / "b", "--resume", str(tmp_path / "a" / "step-00000003")) == 0
    exported = [load_file(tmp_path / name / "export" / "model.safetensors") for name in "ab"]
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(exported[0][key], exported[1][key]) for key in exported[0])
    assert all(t.dtype == torch.float32 for t in exported[0].values())

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a" / "export")
    assert model.dtype == torch.float32
    # The export in fp32 holds the master weights of the checkpoint.
    fresh = finetuning.model(torch.bfloat16)
    opt = FlashAdamW([p for p in fresh.parameters() if p.dim() > 1])
    opt.add_param_group({"params": [p for p in fresh.parameters() if p.dim() == 1]})
    checkpoint.load(tmp_path / "a" / "step-00000006", fresh, opt)
    names = dict(fresh.named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, opt.master_weight(names[name])), name
    prompt = tokenizer.apply_chat_template(finetuning.questions(2)[1]["messages"][:1], add_generation_prompt=True)
    ids = torch.tensor([prompt["input_ids"] if hasattr(prompt, "keys") else prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert out.shape[1] > ids.shape[1]
    assert not (tmp_path / "a" / "step-00000001").exists()


def test_without_release_with_accumulation_and_with_torchs_adamw(inputs, tmp_path):
    """The same six steps by other ways end at about the same loss."""
    _, config = inputs
    ways = {
        "release": [],
        "pieces": ["train.gradient_release=false", "train.accumulate=2"],
        "torch": ["train.gradient_release=false", "optimizer.name=torch_adamw", "model.dtype=fp32"],
    }
    losses = {}
    for name, overrides in ways.items():
        assert run(config, tmp_path / name, "train.clip=0", "run.export=null", "run.eval_every=0", *overrides) == 0
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        losses[name] = [r["eval_loss"] for r in records if "eval_loss" in r][-1]
    assert losses["release"] == pytest.approx(losses["torch"], rel=0.05)
    assert losses["pieces"] == pytest.approx(losses["torch"], rel=0.05)


@pytest.mark.parametrize("name", ["llama3.1-8b", "smollm2-135m"])
def test_the_configs_are_valid(name):
    config = finetune.load(finetune.FinetuneConfig, CONFIGS / f"{name}.yaml", ["train.steps=1"])
    assert config.train.gradient_release
    shape = finetune_model.config_of(config.model.source.removeprefix("random:"))
    with torch.device("meta"):
        model = finetune_model.transformers.AutoModelForCausalLM.from_config(shape)
    expected = {"llama3.1-8b": 8_030_261_248, "smollm2-135m": 134_515_008}[name]
    assert sum(p.numel() for p in model.parameters()) == expected
    plan = one_run.planned(one_run.build_optimizer(config, model.bfloat16()), released=True)
    assert sum(v for k, v in plan.items() if k != "gradients") == pytest.approx(5.1875 * expected, rel=0.001)


def test_random_weights_and_tokens(inputs, tmp_path):
    _, config = inputs
    arguments = ["model.source=random:tiny", "data.train=null", "train.steps=2", "run.export=bf16"]
    assert run(config, tmp_path / "r", *arguments) == 0
    weights = load_file(tmp_path / "r" / "export" / "model.safetensors")
    assert all(t.dtype == torch.bfloat16 for t in weights.values())


MISTAKES = [
    (["model.source=nowhere"], "model.source=nowhere: there is no such file"),
    (["model.source=random:nothing", "data.train=null"], "random:nothing"),
    (["data.train=missing.jsonl"], "missing.jsonl cannot be read"),
    (["data.train=null"], "data.train is missing"),
    (["data.sequence=1"], "sequence must be at least 2"),
    (["data.sequence=4"], "no record has a token to learn"),
    ([f"train.seed={2**63}"], "seed must be"),
    (["train.accumulate=2"], "cannot go with gradient_release"),
    (["train.accumulate=3", "train.gradient_release=false"], "no multiple"),
    (["optimizer.name=torch_adamw"], "has no gradient release"),
    (["optimizer.name=adam"], "optimizer.name must be one of"),
    (["train.batches=3"], "unknown key 'train.batches'"),
    (["model.loss=liger"], "needs a GPU"),
    (["model.tokenizer=nowhere"], "no tokenizer at nowhere"),
    (["data.train={wrong}"], "wrong.jsonl, line 1: a record is"),
    (["--resume", "nowhere"], "no such folder"),
]


@pytest.mark.parametrize(("overrides", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(inputs, tmp_path, capsys, overrides, message):
    path, config = inputs
    (path / "wrong.jsonl").write_text('{"text": 3}\n')
    overrides = [o.format(wrong=path / "wrong.jsonl") for o in overrides]
    assert run(config, tmp_path / "x", *overrides) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.fixture(scope="module")
def half(inputs):
    """A run of 2 of 6 steps: its checkpoint, and the arguments it was made with."""
    path, config = inputs
    settings = ["data.sequence=64", "run.eval_every=0"]
    training = one_run.Finetuning(
        finetune.load(finetune.FinetuneConfig, config, [f"run.folder={path / 'half'}", *settings]),
        torch.device("cpu"),
        None,
    )
    training.train_step()
    training.train_step()
    training.save(RunFolder(path / "half"))
    return path / "half" / "step-00000002", settings


def assert_refused(capsys, code, message, expected_code=2):
    error = capsys.readouterr().err.splitlines()[-1]  # after transformers' progress bar
    assert code == expected_code
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.sequence=128", "data.sequence and the tokenizer must give the same rows"),
        ("data.validation_share=5", "data was "),
        ("train.seed=1", "seed was 0 and is 1"),
        ("train.batch=8", "batch was 4 and is 8"),
    ],
)
def test_a_resume_that_would_read_other_rows_is_refused(inputs, half, tmp_path, capsys, change, message):
    code = run(inputs[1], tmp_path / "x", *half[1], change, "--resume", str(half[0]))
    assert_refused(capsys, code, message)
    assert not (tmp_path / "x").exists()


def test_a_checkpoint_of_something_else_is_refused(inputs, tmp_path, capsys):
    model = finetuning.model(torch.bfloat16)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False))
    opt = FlashAdamW([{"params": matrices}, {"params": vectors}])
    for number, extra in enumerate((None, {"epoch": 1})):
        checkpoint.save(tmp_path / str(number), model, opt, extra=extra)
        code = run(inputs[1], tmp_path / "x", "--resume", str(tmp_path / str(number)))
        assert_refused(capsys, code, "was not saved by this launcher")


def test_a_resume_follows_the_hyperparameters_of_its_config(inputs, half, tmp_path):
    changed = ["optimizer.weight_decay=0.5", "optimizer.betas=[0.8, 0.9]", "train.steps=3", "run.export=null"]
    assert run(inputs[1], tmp_path / "x", *half[1], *changed, "--resume", str(half[0])) == 0
    saved = checkpoint.verify(tmp_path / "x" / "step-00000003").optimizer
    assert [group["weight_decay"] for group in saved["param_groups"]] == [0.5, 0.0]
    assert {tuple(group["betas"]["$tuple"]) for group in saved["param_groups"]} == {(0.8, 0.9)}


def test_weights_that_are_no_numbers_do_not_replace_a_checkpoint(inputs, half, tmp_path, capsys):
    """The loss of the step that makes them is finite."""
    shutil.copytree(half[0], tmp_path / "x" / half[0].name)
    settings = ["optimizer.lr=1e38", "train.warmup=0", "run.save_every=1", "run.keep_last=1"]
    code = run(inputs[1], tmp_path / "x", *half[1], *settings, "--resume", "auto")
    assert_refused(capsys, code, "are no longer finite, earlier checkpoints are kept", 1)
    (kept,) = (tmp_path / "x").glob("step-*")
    names = [name for name in checkpoint.verify(kept).tensors if name.startswith("model.")]
    assert names
    weights = read_plain(Reader(kept, checkpoint.verify(kept)), names)
    assert all(torch.isfinite(weight).all() for weight in weights.values())


def test_an_export_that_a_kill_prevented_is_made_by_the_resume(inputs, tmp_path, capsys):
    arguments = ["train.steps=1", "run.eval_every=0", "--resume", "auto"]
    assert run(inputs[1], tmp_path / "x", *arguments) == 0
    export = tmp_path / "x" / "export"
    assert sorted(path.name for path in (tmp_path / "x").glob("export*")) == ["export"]
    whole = (export / "model.safetensors").read_bytes()
    shutil.rmtree(export)
    assert run(inputs[1], tmp_path / "x", *arguments) == 0
    assert (export / "model.safetensors").read_bytes() == whole
    capsys.readouterr()
    assert run(inputs[1], tmp_path / "x", "run.export=null", *arguments) == 0
    assert capsys.readouterr().out.endswith("nothing to do: the run is at step 1 of 1\n")


def test_a_run_that_is_there_already(inputs, tmp_path, capsys):
    _, config = inputs
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "something").touch()
    assert run(config, tmp_path / "x") == 2
    assert "exists" in capsys.readouterr().err


def test_a_model_from_gguf_is_an_ordinary_one(tmp_path):
    """What transformers makes of a GGUF file may be packed, and counts as quantized, which saving refuses."""
    weights = finetuning.gguf_file(tmp_path / "model.gguf")
    model = finetune_model.read(tmp_path / "model.gguf", torch.bfloat16)
    assert not getattr(model, "is_quantized", False)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    found = dict(model.named_parameters())
    for name, exact in weights.items():
        assert (found[name].float() - exact).abs().max() < 0.3  # 15 steps over a range of about 5
        assert (found[name].float() - exact).abs().mean() < 0.1
    model.save_pretrained(tmp_path / "folder")
    assert (tmp_path / "folder" / "model.safetensors").exists()


def test_heads_that_cannot_be_computed_here(tmp_path):
    model = finetuning.model()
    model.config.final_logit_softcapping = 30.0
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="final_logit_softcapping"):
        finetune_model.load_model(ModelSection(str(tmp_path)), torch.device("cpu"), 0)


def test_the_learning_rate():
    train = TrainSection(warmup=2, schedule="linear")
    assert [one_run.learning_rate(train, 1.0, t, 4) for t in range(4)] == pytest.approx([0.5, 1.0, 1.0, 0.55])
    cosine = TrainSection(warmup=0, schedule="cosine")
    assert one_run.learning_rate(cosine, 1.0, 5, 10) == pytest.approx(0.55)


def test_rows_without_a_target_are_an_error(inputs, tmp_path):
    _, config = inputs
    loaded = finetune.load(finetune.FinetuneConfig, config, [f"run.folder={tmp_path}"])
    training = one_run.Finetuning(loaded, torch.device("cpu"), None)
    training.training.rows.targets.fill_(-100)
    with pytest.raises(UserError, match="no token to learn"):
        training.train_step()


def test_config_is_kept_with_the_run(inputs, tmp_path):
    _, config = inputs
    assert run(config, tmp_path / "c", "train.steps=1", "run.export=null") == 0
    assert "steps: 1" in (tmp_path / "c" / "config.yaml").read_text()
    assert all(json.loads(line) for line in (tmp_path / "c" / "metrics.jsonl").read_text().splitlines())


def test_the_first_step_with_release_is_clipped_as_without(inputs, tmp_path):
    """Adam's first step does not depend on the gradients' size, but its variance does, and for long."""
    _, config = inputs
    states = {}
    for release in ("true", "false"):
        overrides = [f"run.folder={tmp_path}", "train.clip=0.01", f"train.gradient_release={release}"]
        training = one_run.Finetuning(
            finetune.load(finetune.FinetuneConfig, config, overrides), torch.device("cpu"), None
        )
        training.train_step()
        states[release] = [training.opt.state[p]["exp_avg_sq"] for p in training.model.parameters() if p.dim() == 1]
    for ours, exact in zip(states["true"], states["false"], strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=0)
