from __future__ import annotations

import json
import math

import pytest
from config import UserError, load
from curves import draw, main, smooth
from metrics import Reporter, read_metrics
from pretrain_config import PretrainConfig
from run_folder import RunFolder


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    for step in (5, 10, 100_000_000):
        run.step_folder(step).mkdir(parents=True)
    (run.path / "step-abc").mkdir()
    (run.path / "step-00000012.saving").mkdir()
    return run


def test_only_finished_checkpoints_count_and_the_latest_is_resumed(folder):
    assert folder.steps() == [5, 10, 100_000_000]
    assert folder.to_resume("auto") == folder.path / "step-100000000"


def test_auto_starts_a_new_run_where_there_is_none(tmp_path):
    assert RunFolder(tmp_path / "new").to_resume("auto") is None
    assert RunFolder(tmp_path / "new").to_resume(None) is None


def test_old_checkpoints_are_removed_and_nothing_else(folder):
    folder.remove_old(keep_last=2)
    assert folder.steps() == [10, 100_000_000]
    folder.remove_old(keep_last=5)
    assert folder.steps() == [10, 100_000_000]
    assert (folder.path / "step-abc").is_dir()


def test_the_config_is_saved_and_one_that_changed_is_kept(tmp_path):
    run = RunFolder(tmp_path / "run")
    first = load(PretrainConfig, None, ["train.steps=5"])
    with run.claim(first, 0):
        pass
    with run.claim(first, 3):
        pass
    assert not list(run.path.glob("config.until*"))
    second = load(PretrainConfig, None, ["train.steps=7"])
    with run.claim(second, 3):
        pass
    assert load(PretrainConfig, run.config) == second
    assert load(PretrainConfig, run.path / "config.until-step-00000003.yaml") == first


def test_space_is_counted_for_what_is_missing(folder, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 3 * 5.4e9}))
    folder.check_space(10**9, flash=True, keep_last=5)  # 3 are there, 3 more are written at most
    with pytest.raises(UserError, match=r"needs 21.6 GB for 4 more checkpoints of 5.4 GB, its disk has 16.2 GB"):
        folder.check_space(10**9, flash=True, keep_last=6)
    with pytest.raises(UserError, match=r"checkpoints of 12.1 GB"):
        folder.check_space(10**9, flash=False, keep_last=5)


def values(loss: float) -> dict[str, float]:
    return {"loss": loss, "lr": 0.1, "tokens_per_second": 10.0, "memory": 2.0**30}


def test_records_of_an_interrupted_run_read_as_one_that_was_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Reporter(path, active=True, total=4) as reporter:
        reporter.record(0, {"started": {}})
        for step in (1, 2, 3):
            reporter.train_step(step, values(float(step)))
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')  # killed here; the last checkpoint was after step 2
    with Reporter(path, active=True, total=4) as reporter:
        reporter.record(2, {"started": {}})
        for step in (3, 4):
            reporter.train_step(step, values(step + 0.5))
    assert [(r["step"], r["loss"]) for r in read_metrics(path) if "loss" in r] == [(1, 1), (2, 2), (3, 3.5), (4, 4.5)]
    assert sum("started" in record for record in read_metrics(path)) == 2


def test_other_ranks_write_nothing(tmp_path):
    with Reporter(tmp_path / "metrics.jsonl", active=False, total=4) as reporter:
        reporter.train_step(1, values(1.0))
        reporter.say("x")
    assert not list(tmp_path.iterdir())


def test_the_output_of_a_batch_job_stays_short(tmp_path, capsys):
    with Reporter(tmp_path / "m.jsonl", active=True, total=500) as reporter:
        for step in range(1, 501):
            reporter.train_step(step, values(1.0))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1 of 500  loss 1.0000  10 tokens/s  1.00 GiB"
    assert lines[-1].startswith("step 500 of 500")
    assert len(lines) < 10


def test_curves_are_drawn_from_run_folders(tmp_path, capsys):
    records = [{"step": s, **values(3 / s)} for s in range(1, 9)] + [{"step": 8, "eval_loss": 1.0}]
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    picture = tmp_path / "new" / "picture.png"
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([str(tmp_path / "none")]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err
    draw({"without evaluation": records[:-1]}, picture)


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant():
    assert smooth([3.0, 1.0])[0] == 3.0
    assert all(math.isclose(value, 2.0) for value in smooth([2.0] * 50))
