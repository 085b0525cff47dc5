"""How a checkpoint is published: whatever happens, what was there before can be loaded."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from flashdist import FlashAdamW, checkpoint
from flashdist.checkpoint import folder as folder_module
from flashdist.checkpoint import saving
from flashdist.checkpoint.folder import SavingFolder, old_folder, saving_folder


def make(seed=0, steps=2):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 48), nn.Linear(48, 7)).to(torch.bfloat16)
    opt = FlashAdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        opt.step()
    return model, opt


def weights(path):
    model, opt = make(9, steps=0)
    extra = checkpoint.load(path, model, opt)
    return extra, [p.detach().clone() for p in model.parameters()]


def entries(folder):
    return sorted(p.name for p in folder.iterdir())


def test_an_existing_path_is_kept_unless_overwriting_is_asked_for(tmp_path):
    path = tmp_path / "run" / "step-1"
    first, second = make(1), make(2)
    checkpoint.save(path, *first, extra=1)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        checkpoint.save(path, *second, extra=2)
    assert weights(path)[0] == 1
    checkpoint.save(path, *second, extra=2, overwrite=True)
    extra, found = weights(path)
    assert extra == 2
    assert all(map(torch.equal, found, second[0].parameters()))
    assert entries(path.parent) == ["step-1"]
    assert entries(path) == ["manifest.json", "rank-00000.safetensors"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_checkpoint_is_never_overwritten(tmp_path, kind):
    path = tmp_path / "thesis"
    if kind == "file":
        path.write_text("months of work")
    else:
        path.mkdir()
        (path / "chapter").write_text("months of work")
    with pytest.raises(FileExistsError, match="no flashdist checkpoint"):
        checkpoint.save(path, *make(), overwrite=True)
    assert (path if kind == "file" else path / "chapter").read_text() == "months of work"
    assert entries(tmp_path) == ["thesis"]


def test_a_second_job_saving_to_the_same_path_is_told_so(tmp_path):
    path = tmp_path / "c"
    first = SavingFolder(path, overwrite=False)
    with pytest.raises(FileExistsError, match="another save to"):
        checkpoint.save(path, *make())
    assert saving_folder(path).exists(), "the first job's files were touched"
    first.discard()
    checkpoint.save(path, *make())


def test_what_a_killed_save_left_is_cleared(tmp_path):
    path = tmp_path / "c"
    saving_folder(path).mkdir()
    (saving_folder(path) / "rank-00000.safetensors").write_bytes(b"half")
    (saving_folder(path) / "rank-00007.safetensors").write_bytes(b"of another world size")
    checkpoint.save(path, *make(), extra=5)
    assert weights(path)[0] == 5
    assert entries(tmp_path) == ["c"]
    assert entries(path) == ["manifest.json", "rank-00000.safetensors"]


def test_a_save_killed_between_its_renames_leaves_the_old_one_loadable(tmp_path, caplog):
    path = tmp_path / "c"
    checkpoint.save(path, *make(1), extra=1)
    path.rename(old_folder(path))
    assert weights(path)[0] == 1
    assert "interrupted save" in caplog.text
    with pytest.raises(FileExistsError):
        checkpoint.save(path, *make(2), extra=2)
    assert weights(path)[0] == 1
    checkpoint.save(path, *make(2), extra=2, overwrite=True)
    assert weights(path)[0] == 2
    assert entries(tmp_path) == ["c"]


def test_a_save_killed_after_its_renames_leaves_the_new_one(tmp_path):
    path = tmp_path / "c"
    checkpoint.save(old_folder(path), *make(1), extra=1)
    checkpoint.save(path, *make(2), extra=2, overwrite=True)
    assert weights(path)[0] == 2
    assert entries(tmp_path) == ["c"]


@pytest.mark.parametrize("fault", ["missing", "shorter"])
def test_a_file_that_is_not_as_it_was_written_is_not_published(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(folder_module, "_PATIENCE", 0.0)
    checkpoint.save(tmp_path / "c", *make(1), extra=1)
    written = saving.write_shard

    def meddled(path, pieces):
        found = written(path, pieces)
        path.unlink() if fault == "missing" else os.truncate(path, path.stat().st_size - 1)
        return found

    monkeypatch.setattr(saving, "write_shard", meddled)
    with pytest.raises(checkpoint.CheckpointError, match=r"rank-00000\.safetensors.*nothing was published"):
        checkpoint.save(tmp_path / "c", *make(2), extra=2, overwrite=True)
    assert weights(tmp_path / "c")[0] == 1
    assert entries(tmp_path) == ["c"]


def test_a_path_taken_meanwhile_is_not_lost(tmp_path):
    path = tmp_path / "c"
    folder = SavingFolder(path, overwrite=False)
    path.mkdir()
    (path / "other").write_text("published by somebody else")
    (folder.folder / "x").write_text("mine")
    with pytest.raises(checkpoint.CheckpointError, match="taken its name"):
        folder.publish()
    assert entries(path) == ["other"]
    folder.discard()


def test_too_small_a_disk_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    path = tmp_path / "c"
    checkpoint.save(path, *make(1), extra=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(OSError, match="make room"):
        checkpoint.save(path, *make(2), overwrite=True)
    assert weights(path)[0] == 1
    assert entries(tmp_path) == ["c"]


def test_a_disk_that_fills_up_while_writing(tmp_path):
    """A limit on file sizes fails writes as a full disk does, for everybody."""
    path = tmp_path / "c"
    checkpoint.save(path, *make(1), extra=1)
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SMALL_FILES), str(path)],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert run.returncode == 7, run.stderr
    assert weights(path)[0] == 1
    assert entries(tmp_path) == ["c"]


SMALL_FILES = """
    import resource, signal, sys
    from tests.checkpoint.test_folder import make
    from flashdist import checkpoint
    pair = make(2)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    try:
        checkpoint.save(sys.argv[1], *pair, overwrite=True)
    except OSError as error:
        sys.exit(7)
"""


def test_a_folder_that_cannot_be_written(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(OSError):
        checkpoint.save(tmp_path / "c", *make())
    tmp_path.chmod(0o700)


KILLED = """
    import sys
    import torch
    from tests.checkpoint.test_folder import make
    from flashdist import checkpoint
    pair = make(3)
    checkpoint.save(sys.argv[1], *pair, extra=0, overwrite=True)
    print("saving", flush=True)
    for i in range(1, 1_000_000):
        checkpoint.save(sys.argv[1], *pair, extra=i, overwrite=True)
"""


def kill_while_saving(path, delay):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(path)],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"saving\n"
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("delay", [0.0])
def test_a_process_killed_while_it_saves(tmp_path, delay):
    kill_while_saving(tmp_path / "c", delay)
    extra, _ = weights(tmp_path / "c")
    assert extra >= 0
    checkpoint.save(tmp_path / "c", *make(), extra=-1, overwrite=True)
    assert weights(tmp_path / "c")[0] == -1
    assert entries(tmp_path) == ["c"]


def test_the_path_may_be_relative_and_a_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save("a/b", *make(), extra=1)
    Path("latest").symlink_to("a/b")
    assert weights("latest")[0] == 1
    checkpoint.save("latest", *make(), extra=2, overwrite=True)
    assert weights("a/b")[0] == 2
    assert Path("latest").is_symlink()
