"""Bad input to launch/pretrain.py: one line that says what to do, exit code 2, nothing written."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator

import pretrain
import pytest
import torch
from config import UserError
from run_folder import RunFolder

from flashdist.checkpoint import verify
from flashdist.checkpoint.reading import Reader, read_plain
from tests.support.pretraining import overrides

Outcome = tuple[int, str, str]


@pytest.fixture
def run(tmp_path, capsys) -> Iterator[Callable[..., Outcome]]:
    """Runs the script in this process; gives exit code, stdout and stderr."""
    config = tmp_path / "config.yaml"
    config.touch()
    state, threads = torch.get_rng_state(), torch.get_num_threads()

    def run(*more: str) -> Outcome:
        settings = [f"run.folder={tmp_path / 'run'}", "parallel.strategy=single", "train.steps=2", "train.warmup=1"]
        code = pretrain.main([str(config), *overrides(tmp_path, *settings), *more])
        return code, *capsys.readouterr()

    yield run
    torch.set_rng_state(state)
    torch.set_num_threads(threads)


def assert_refused(outcome: Outcome, *parts: str) -> None:
    code, _, error = outcome
    assert code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for part in parts:
        assert part in error


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train.stesp=3"], ["unknown key 'train.stesp' (did you mean 'steps'?)"]),
        (["data.folder=/nowhere"], ["data.folder /nowhere is no folder"]),
        (["data.pattern=*.md"], ["has no text in it (files that fit '*.md'"]),
        (["data.tokenizer=bpee"], ["data.tokenizer 'bpee' is neither bytes nor bpe"]),
        (["parallel.strategy=hsdp", "parallel.shard_ranks=2"], ["needs 4 ranks", "started: 1"]),
        (["train.batch=7"], ["train.batch=7 is no multiple of 1 ranks x train.micro_batch=2: take train.batch=6 or 8"]),
        ([f"train.seed={2**63}"], ["seed must be below 2^63"]),
        (["train.batch=1"], ["take train.batch=2"]),
        (["model.context=100000"], ["tokens, too few for one sequence of model.context=100000"]),
        (["model.vocab_size=100"], ["model.vocab_size=100 is below the tokenizer's 257"]),
        (["parallel.device=cuda"], ["torch sees no GPU"]),
        (["--resume", "runs/none"], ["--resume runs/none: no such folder"]),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_and_nothing_is_written(run, tmp_path, arguments, parts):
    if arguments == ["parallel.device=cuda"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert_refused(run(*arguments), *parts)
    assert not (tmp_path / "run").exists()


def test_an_empty_folder_and_a_broken_config_are_refused(run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert_refused(run(f"data.folder={tmp_path / 'empty'}"), "has no text in it")
    (tmp_path / "config.yaml").write_text("train:\n  steps: [1\n")
    assert_refused(run(), "config.yaml, line ", "no valid YAML")


def test_ids_that_were_changed_are_refused_before_any_step(run, tmp_path):
    assert run("run.stop_after=1")[0] == 0
    (ids,) = (tmp_path / "cache").glob("*/train.bin")
    ids.write_bytes(ids.read_bytes()[:-2] + (300).to_bytes(2, "little"))
    again = run("--resume", "auto")
    assert_refused(again, f"{ids} has the id 300 at position {ids.stat().st_size // 2 - 1}, the tokenizer has 257 ids")
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000001"]


def test_a_folder_that_cannot_be_made_is_refused(run, tmp_path):
    (tmp_path / "file").touch()
    assert_refused(
        run(f"run.folder={tmp_path / 'file' / 'run'}"), "run.folder", "cannot be written to: Not a directory"
    )


def test_an_existing_run_is_not_written_over_but_resumed_and_another_model_is_refused(run, tmp_path):
    code, output, error = run("run.save_every=1")
    assert (code, error) == (0, "")
    assert "step 2 of 2" in output
    folder = tmp_path / "run"
    assert_refused(run(), "exists: go on with it by --resume auto")
    assert_refused(run("--resume", "auto", "model.width=32", "model.layers=1"), "cannot resume from", "step-00000002")
    assert_refused(run("--resume", str(folder / "step-00000001")), "has later checkpoints")
    other = f"run.folder={tmp_path / 'other'}"
    assert_refused(run(other, "--resume", str(tmp_path / "text")), "cannot resume from")
    assert not (tmp_path / "other").exists()
    before = sorted(path.name for path in folder.iterdir())
    code, output, _ = run("--resume", "auto")
    assert code == 0
    assert "nothing to do: the run is at step 2 of 2" in output
    assert sorted(path.name for path in folder.iterdir()) == before
    code, output, _ = run(other, "--resume", str(folder / "step-00000001"))
    assert code == 0
    assert (tmp_path / "other" / "step-00000002").is_dir()
    assert not (folder / "step-00000003").exists()


def test_another_model_of_the_same_weights_is_refused(run, tmp_path):
    """No tensor's shape shows these."""
    code, output, _ = run("model.kind=llama", "run.stop_after=1")
    assert code == 0
    assert "saved after step 1 (run.stop_after); go on with --resume auto" in output
    for change, message in (
        ("model.heads=1", "model.heads was 2 and is 1"),
        ("model.rope_base=100", "model.rope_base was 500000.0 and is 100.0"),
    ):
        assert_refused(run("model.kind=llama", change, "--resume", "auto"), "cannot resume from", message)
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000001"]


def test_a_full_disk_is_noticed_before_the_run_starts(run, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1000))
    assert_refused(run(), "its disk has 0.0 GB", "lower run.keep_last")
    assert not (tmp_path / "run").exists()


def test_two_runs_in_one_folder_do_not_mix(run, tmp_path):
    folder = RunFolder(tmp_path / "claimed")
    config = pretrain.load(pretrain.PretrainConfig, None, [])
    with folder.claim(config, 0):
        with pytest.raises(UserError, match="another process is writing"), folder.claim(config, 0):
            pass
        assert_refused(run(f"run.folder={folder.path}", "--resume", "auto"), "another process is writing")
    with folder.claim(config, 0):
        pass


def test_a_loss_that_is_no_number_ends_the_run_with_a_line(run):
    code, _, error = run("optimizer.lr=1e30", "train.max_norm=.inf", "train.steps=6")
    assert code == 1
    assert error.startswith("error: the loss of step ")
    assert "lower optimizer.lr" in error


def test_weights_that_are_no_numbers_do_not_replace_a_checkpoint(run, tmp_path):
    settings = ["run.save_every=1", "run.keep_last=1", "run.log_every=100"]
    assert run(*settings)[0] == 0
    code, _, error = run(*settings, "train.steps=8", "optimizer.lr=1e38", "--resume", "auto")
    assert code == 1
    assert "are no longer finite, earlier checkpoints are kept" in error
    (kept,) = (tmp_path / "run").glob("step-*")
    for name, stored in verify(kept).tensors.items():
        if name.startswith("model."):
            assert torch.isfinite(read_plain(Reader(kept, verify(kept)), [name])[name]).all(), stored


def test_a_resume_follows_the_hyperparameters_of_its_config(run, tmp_path):
    assert run()[0] == 0
    changed = ["optimizer.weight_decay=0.5", "optimizer.betas=[0.8, 0.9]", "optimizer.eps=1e-7"]
    assert run("train.steps=3", *changed, "--resume", "auto")[0] == 0
    saved = verify(tmp_path / "run" / "step-00000003").optimizer
    assert saved is not None
    for group, weight_decay in zip(saved["param_groups"], (0.5, 0.0), strict=True):
        assert group["weight_decay"] == weight_decay
        assert group["betas"] == {"$tuple": [0.8, 0.9]}
        assert group["eps"] == 1e-7
