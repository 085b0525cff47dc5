from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import token_check
import tokens
from config import UserError
from data import Document
from tokenizers import Tokenizer
from tokens import END, TokenFiles, open_tokens, prepare

from tests.support.ranks import run_ranks

TEXTS = {f"document {i}": f"the text of document number {i}; ".encode() * (i % 5 + 1) for i in range(60)}


def documents(texts: dict[str, bytes] | None = None) -> list[Document]:
    return [Document(name, str(len(text)), partial(bytes, text)) for name, text in (texts or TEXTS).items()]


@pytest.fixture
def make(tmp_path) -> Callable[..., TokenFiles]:
    settings = {"tokenizer": "bytes", "vocab_size": 300, "validation_share": 10, "cache": tmp_path / "cache"}
    return lambda texts=None, **changes: prepare(documents(texts), **(settings | changes))


def split_at(ids: np.ndarray, end: int) -> list[list[int]]:
    assert ids[-1] == end
    return [list(part[part != end]) for part in np.split(ids, np.flatnonzero(ids == end) + 1)][:-1]


def test_every_document_is_whole_in_exactly_one_part(make):
    files = make()
    train, validation = (
        [bytes(map(int, ids)) for ids in split_at(part, 256)] for part in (files.train, files.validation)
    )
    assert sorted(train + validation) == sorted(TEXTS.values())
    assert 2 <= len(validation) <= 12
    assert files.meta.vocab_size == 257
    assert files.train.dtype == np.uint16
    assert files.meta.train_tokens == len(files.train)


def test_a_bpe_is_trained_on_the_training_part_and_decodes_to_the_text(make):
    files = make(tokenizer="bpe")
    tokenizer = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == files.meta.vocab_size <= 300
    texts = [tokenizer.decode(ids).encode() for ids in split_at(files.validation, tokenizer.token_to_id(END))]
    assert texts
    assert set(texts) <= set(TEXTS.values())
    assert len(files.train) < sum(map(len, TEXTS.values())) / 2  # it learned to join letters


def test_the_second_call_reads_nothing_and_gives_the_same(make, monkeypatch):
    first = make(tokenizer="bpe")
    monkeypatch.setattr(tokens, "_build", lambda *args: pytest.fail("built again"))
    second = make(tokenizer="bpe")
    assert second.meta == first.meta
    assert np.array_equal(second.train, first.train)
    assert isinstance(second.train, np.memmap)


def test_another_text_or_setting_is_another_entry(make):
    folders = {
        make().folder,
        make(validation_share=5).folder,
        make(tokenizer="bpe").folder,
        make(tokenizer="bpe", vocab_size=320).folder,
        make({**TEXTS, "document 3": b"changed"}).folder,
    }
    assert len(folders) == 5
    assert make({**TEXTS, "document 3": b"changed"}).meta.digest != make().meta.digest


def test_the_digest_depends_on_the_ids_alone(make, tmp_path):
    stamped = [Document(d.name, d.stamp + " later", d.read) for d in documents()]
    again = prepare(stamped, tokenizer="bytes", vocab_size=300, validation_share=10, cache=tmp_path / "cache")
    assert again.folder != make().folder
    assert again.meta.digest == make().meta.digest


def test_a_tokenizer_from_a_file_is_used_as_it_is(make, tmp_path):
    trained = make(tokenizer="bpe").folder / "tokenizer.json"
    other = tmp_path / "mine.json"
    other.write_bytes(trained.read_bytes())
    files = make({"new": b"the text of something new " * 4}, tokenizer=str(other))
    assert files.meta.vocab_size == make(tokenizer="bpe").meta.vocab_size


def test_a_single_document_gives_its_end_to_the_validation(make):
    text = "".join(f"line {i} ä\n" for i in range(100)).encode()
    files = make({"one": text})
    train, validation = (bytes(map(int, split_at(part, 256)[0])) for part in (files.train, files.validation))
    assert train + validation == text
    assert len(validation) == pytest.approx(len(text) / 10, abs=3)
    validation.decode()  # not cut inside a character


def test_text_that_is_no_utf8_is_counted(make):
    files = make({**TEXTS, "broken": b"\xff\xfe text"}, tokenizer="bpe")
    assert files.meta.replaced_documents == 1


def test_an_entry_that_was_interrupted_is_made_anew_and_a_damaged_one_is_named(make):
    folder = make().folder
    half = folder.with_name(folder.name + ".building")
    folder.rename(half)
    (half / "meta.json").unlink()
    files = make()
    assert not half.exists()
    with open(folder / "train.bin", "ab") as file:
        file.write(b"xx")
    with pytest.raises(UserError, match=r"train.bin is damaged: remove the folder"):
        open_tokens(files.folder)


def edit(path: Path, position: int, value: int) -> None:
    """Another id in a file of the same size, its time set back."""
    status = path.stat()
    ids = np.memmap(path, dtype="<u2", mode="r+")
    ids[position] = value
    ids.flush()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("part", ["train", "validation"])
def test_ids_that_were_changed_are_refused_by_place_or_digest(make, monkeypatch, part):
    monkeypatch.setattr(token_check, "CHUNK_BYTES", 64)
    files = make()
    path, old = files.folder / f"{part}.bin", int(getattr(files, part)[70])
    edit(path, 70, 257)
    with pytest.raises(UserError, match=rf"{part}.bin has the id 257 at position 70, the tokenizer has 257 ids"):
        make()
    edit(path, 70, (old + 1) % 256)
    with pytest.raises(UserError, match=r"bin was changed after it was made.*remove the folder"):
        make()
    edit(path, 70, old)
    assert make().meta == files.meta


def test_ids_are_compared_after_a_change_alone(make, monkeypatch):
    files = make()
    compared = []
    digest = token_check._digest
    monkeypatch.setattr(token_check, "_digest", lambda *given: compared.append(given) or digest(*given))
    make()
    assert not compared
    (files.folder / "train.bin").touch()
    make()
    (files.folder / "checked.json").unlink()  # as in the caches of earlier releases
    make()
    make()
    assert len(compared) == 2


def test_unusable_tokenizers_and_caches_are_refused(make, tmp_path):
    with pytest.raises(UserError, match="neither bytes nor bpe nor the path"):
        make(tokenizer="bpe2")
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(UserError, match=r"is no tokenizer.json that can be used"):
        make(tokenizer=str(bad))
    endless = json.loads((make(tokenizer="bpe").folder / "tokenizer.json").read_text().replace(END, "<|other|>"))
    bad.write_text(json.dumps(endless))
    with pytest.raises(UserError, match="has no end mark"):
        make(tokenizer=str(bad))
    with pytest.raises(UserError, match=r"data.cache .* cannot be used"):
        make(cache=bad / "inside")


def build_at_once(rank: int, world_size: int, cache: Path) -> tuple[str, int]:
    files = prepare(documents(), tokenizer="bpe", vocab_size=300, validation_share=10, cache=cache)
    return files.meta.digest, (files.folder / "meta.json").stat().st_ino


def test_ranks_that_start_at_once_share_one_entry(tmp_path):
    results = run_ranks(build_at_once, 3, tmp_path / "cache")
    assert len(set(results)) == 1
