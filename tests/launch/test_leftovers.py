"""Input of the launcher that ended in a traceback, or was passed over without a word."""

from __future__ import annotations

import os
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import tokenizers
from config import UserError, load, read_yaml
from data import Document, in_folder
from metrics import read_metrics
from pretrain_config import PretrainConfig
from run_folder import RunFolder
from stop import interruptible
from tokens import open_tokens, prepare
from training import Training


@pytest.mark.parametrize("file", ["meta.json", "train.bin"])
@pytest.mark.parametrize("content", [None, b"", b"[1]", b"{}", b"\xff", b'{"vocab_size": "x"}'])
def test_a_damaged_cache_of_tokens_is_refused(tmp_path, file, content):
    text = [Document(str(i), "1", partial(bytes, b"some text")) for i in range(20)]
    folder = prepare(text, tokenizer="bytes", vocab_size=257, validation_share=5, cache=tmp_path).folder
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=rf"{file} is damaged: remove the folder"):
        open_tokens(folder)


def test_links_to_folders_are_followed_and_loops_refused(tmp_path):
    top, other = tmp_path / "top", tmp_path / "other"
    top.mkdir()
    other.mkdir()
    (other / "a.txt").write_text("text")
    (top / "link").symlink_to(other)
    assert [document.name for document in in_folder(top)] == ["link/a.txt"]
    (other / "back").symlink_to(top)
    with pytest.raises(UserError, match="back is a link to a folder that it is in"):
        in_folder(top)


def test_a_name_that_is_no_utf8_is_refused(tmp_path):
    try:
        with open(os.fsencode(tmp_path) + b"/\xff.txt", "w") as file:
            file.write("text")
    except OSError:
        pytest.skip("the file system takes no such name")
    with pytest.raises(UserError, match="is no UTF-8: rename it"):
        in_folder(tmp_path)


def test_lines_of_metrics_that_are_no_records_are_passed_over(tmp_path):
    (tmp_path / "m").write_text('1\n["started"]\nnull\n"started"\n{"loss": 1}\n{"step": 1, "loss": 2}\n')
    assert read_metrics(tmp_path / "m") == [{"step": 1, "loss": 2}]


@pytest.mark.parametrize("value", ["-1", "0", ".nan", ".inf", "1e300"])
def test_a_timeout_that_is_none_is_refused(value):
    with pytest.raises(UserError, match="parallel: timeout_minutes must be above 0"):
        load(PretrainConfig, None, [f"parallel.timeout_minutes={value}"])


def test_what_a_kill_left_half_removed_or_half_saved_is_removed(tmp_path):
    folder = RunFolder(tmp_path)
    left = tmp_path / "removing-00000001", tmp_path / "step-00000003.saving"
    for path in (folder.step_folder(1), folder.step_folder(2), *left):
        path.mkdir()
        (path / "file").touch()
    folder.remove_old(1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_an_interrupt_is_one_line_and_130(capsys):
    def main() -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    assert interruptible(main) == 130
    assert interruptible(lambda: 3) == 3
    assert capsys.readouterr().err.splitlines() == [
        "interrupted: checkpoints are intact, go on from the last one with --resume auto"
    ]


def test_merge_keys_of_yaml_are_refused_by_a_clear_line(tmp_path):
    (tmp_path / "c.yaml").write_text("a: &a {x: 1}\nb:\n  <<: *a\n  y: 3\n")
    with pytest.raises(UserError, match=r"c.yaml, line 3, column 3: .*merge keys \(<<\) are not taken"):
        read_yaml(tmp_path / "c.yaml")


@pytest.mark.parametrize("extra", [None, {"step": 1}])
def test_a_checkpoint_that_says_no_position_is_refused(tmp_path, extra):
    optimizer = SimpleNamespace(param_groups=[])
    training = SimpleNamespace(trainee=SimpleNamespace(optimizer=optimizer, load=lambda path: extra))
    training._position = lambda: {"step": 0, "samples": 0, "text": "", "seed": 0, "context": 0}
    with pytest.raises(UserError, match="was not saved by this launcher"):
        Training._load(training, tmp_path)


def test_ids_above_the_number_of_tokens_are_kept(tmp_path):
    words = tokenizers.models.WordLevel({"a": 0, "b": 70000, "<|endoftext|>": 2}, unk_token="a")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "t.json"))
    text = [Document(str(i), "1", partial(bytes, b"a b a")) for i in range(20)]
    files = prepare(text, tokenizer=str(tmp_path / "t.json"), vocab_size=0, validation_share=5, cache=tmp_path / "c")
    assert files.meta.vocab_size == 70001
    assert list(files.train[:4]) == [0, 70000, 0, 2]


def test_a_batch_that_no_list_could_hold_is_refused():
    with pytest.raises(UserError, match="train: batch must be at most"):
        load(PretrainConfig, None, ["train.batch=1e12"])
