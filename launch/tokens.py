"""From documents to token ids on disk: tokenised once, cached, and memory-mapped from then on.

A cache entry is a folder, named after all that decides its content (names, sizes and times of the documents, the
tokenizer and its settings):

    train.bin, validation.bin   the ids, uint16 or uint32, documents one after the other, an end mark behind each
    tokenizer.json              in the format of the `tokenizers` library; missing where one token is one byte
    meta.json                   counts, the dtype, and a digest of the ids, which a run saves with its checkpoints
    checked.json                of which files it is known that their ids have that digest (token_check.py)
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import token_check
from config import UserError
from data import Document, held_out

FORMAT = 2  # 1: ids above the number of tokens were cut off
END = "<|endoftext|>"
# Text that a new BPE is trained on at most, and text that is encoded at a time.
TRAINING_BYTES = 64 << 20
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Meta:
    """What meta.json holds."""

    vocab_size: int
    train_tokens: int
    validation_tokens: int
    documents: int
    text_bytes: int
    replaced_documents: int  # were no UTF-8; what could not be decoded became U+FFFD
    digest: str


@dataclass(frozen=True)
class TokenFiles:
    """The two parts as memory-mapped arrays of ids, and what is known about them."""

    folder: Path
    meta: Meta
    train: np.ndarray[Any, Any]
    validation: np.ndarray[Any, Any]


class Encoder(Protocol):
    """From texts to ids; each text is followed by the end mark."""

    vocab_size: int

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray[Any, Any]]: ...


class ByteEncoder:
    """One token is one byte, and 256 is the end mark."""

    vocab_size = 257

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray[Any, Any]]:
        """The ids of each text."""
        return [np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(256)) for text in texts]


class LibraryEncoder:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Ids may have gaps: what counts is the largest, for the model and for the dtype on disk.
        self.vocab_size = max(int(tokenizer.get_vocab_size()), 1 + max(tokenizer.get_vocab().values(), default=-1))
        ends = [tokenizer.token_to_id(mark) for mark in (END, "<|end_of_text|>", "</s>")]
        known = [end for end in ends if end is not None]
        if not known:
            raise UserError(f"data.tokenizer has no end mark: add {END!r} to its special tokens")
        self.end: int = known[0]

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray[Any, Any]]:
        """The ids of each text."""
        decoded = [text.decode("utf-8", errors="replace") for text in texts]
        encodings = self.tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [np.array([*encoding.ids, self.end]) for encoding in encodings]


def prepare(
    documents: Sequence[Document], *, tokenizer: str, vocab_size: int, validation_share: int, cache: Path
) -> TokenFiles:
    """The ids of the documents, from the cache or made now. Any number of processes may call it at once.

    Args:
        documents: in the order they are to have.
        tokenizer: `bytes`, `bpe` (trained on the training part), or the path of a tokenizer.json.
        vocab_size: of a `bpe`.
        validation_share: one document in that many is held out; where that would leave a part empty, the last
            `1 / validation_share` of each document is.
        cache: a folder; it is made if need be.

    Raises:
        UserError: a tokenizer or cache that cannot be used, or ids that were changed since they were written.
    """
    settings: dict[str, Any] = {"format": FORMAT, "tokenizer": tokenizer, "validation_share": validation_share}
    if tokenizer == "bpe":
        settings["vocab_size"] = vocab_size
    elif tokenizer != "bytes":
        settings["tokenizer"] = hashlib.sha256(_tokenizer_text(tokenizer).encode()).hexdigest()
    settings["documents"] = [[document.name, document.stamp] for document in documents]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:20]
    folder = cache / key
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{key}.lock"):
            if not (folder / "meta.json").exists():
                building = cache / f"{key}.building"
                shutil.rmtree(building, ignore_errors=True)  # left by a process that was killed
                building.mkdir()
                _build(building, documents, tokenizer, vocab_size, validation_share)
                os.replace(building, folder)
            found = open_tokens(folder)
            token_check.check(folder, found.train.dtype, found.meta.vocab_size, found.meta.digest)
    except OSError as error:
        raise UserError(
            f"data.cache {cache} cannot be used: {error.strerror}; set data.cache to a folder with room for the tokens"
        ) from error
    return found


def open_tokens(folder: Path) -> TokenFiles:
    """Maps what `prepare` left in a folder, and compares the sizes."""
    again = f"is damaged: remove the folder {folder}, and it is made again"
    try:
        meta = Meta(**json.loads((folder / "meta.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{folder / 'meta.json'} {again}") from error
    counts = (meta.vocab_size, meta.train_tokens, meta.validation_tokens)
    if not all(isinstance(count, int) and count >= 0 for count in counts) or not isinstance(meta.digest, str):
        raise UserError(f"{folder / 'meta.json'} {again}")
    dtype = _dtype(meta.vocab_size)
    parts = []
    for name, count in (("train", meta.train_tokens), ("validation", meta.validation_tokens)):
        path = folder / f"{name}.bin"
        if not path.is_file() or path.stat().st_size != count * dtype.itemsize:
            raise UserError(f"{path} {again}")
        parts.append(np.memmap(path, dtype=dtype, mode="r") if count else np.empty(0, dtype=dtype))
    return TokenFiles(folder, meta, parts[0], parts[1])


def _build(folder: Path, documents: Sequence[Document], tokenizer: str, vocab_size: int, share: int) -> None:
    out = [held_out(document.name, share) for document in documents]
    by_document = any(out) and not all(out)
    train = [d for d, o in zip(documents, out, strict=True) if not (by_document and o)]
    encoder = _make_encoder(folder, train, tokenizer, vocab_size)
    dtype = _dtype(encoder.vocab_size)
    digest = hashlib.sha256(str(dtype).encode())
    counts: dict[str, int] = {}
    size = replaced = 0
    for part in ("train", "validation"):
        counts[part] = 0
        with open(folder / f"{part}.bin", "wb") as file:
            for texts in _chunks(_texts_of(part, documents, out if by_document else None, share)):
                for ids in encoder.encode(texts):
                    raw = ids.astype(dtype).tobytes()
                    digest.update(raw)
                    file.write(raw)
                    counts[part] += len(ids)
                size += sum(map(len, texts))
                replaced += sum(not _is_utf8(text) for text in texts)
            file.flush()
            os.fsync(file.fileno())
        digest.update(part.encode())
    meta = Meta(
        encoder.vocab_size,
        counts["train"],
        counts["validation"],
        len(documents),
        size,
        replaced,
        digest.hexdigest(),
    )
    (folder / "meta.json").write_text(json.dumps(asdict(meta), indent=1) + "\n")
    token_check.remember(folder)


def _texts_of(part: str, documents: Sequence[Document], out: Sequence[bool] | None, share: int) -> Iterator[bytes]:
    """The texts of a part: whole documents, or (`out` is None) the front or the end of each."""
    for i, document in enumerate(documents):
        if out is not None:
            if out[i] == (part == "validation"):
                yield document.read()
            continue
        text = document.read()
        cut = len(text) - len(text) // share
        while cut < len(text) and text[cut] & 0xC0 == 0x80:  # not inside a character
            cut += 1
        yield text[:cut] if part == "train" else text[cut:]


def _chunks(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _make_encoder(folder: Path, train: Sequence[Document], tokenizer: str, vocab_size: int) -> Encoder:
    if tokenizer == "bytes":
        return ByteEncoder()
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            f"data.tokenizer={tokenizer} needs the tokenizers library: pip install tokenizers, or data.tokenizer=bytes"
        ) from error
    if tokenizer == "bpe":
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<|padding|>", END],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator(_sample(train), trainer)
    else:
        made = _load_tokenizer(tokenizers, tokenizer)
    made.save(str(folder / "tokenizer.json"))
    return LibraryEncoder(made)


def _sample(documents: Sequence[Document]) -> Iterator[str]:
    """Texts to train on, evenly from all documents where there is more than enough."""
    sizes = [int(d.stamp.split()[0]) if d.stamp.split()[0].isdigit() else 0 for d in documents]
    stride = max(1, -(-sum(sizes) // TRAINING_BYTES))
    left = TRAINING_BYTES
    for document in documents[::stride]:
        text = document.read()[:left]
        left -= len(text)
        yield text.decode("utf-8", errors="replace")
        if not left:
            return


def _tokenizer_text(tokenizer: str) -> str:
    try:
        return Path(tokenizer).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.tokenizer {tokenizer!r} is neither bytes nor bpe nor the path of a tokenizer.json that can be read"
        ) from error


def _load_tokenizer(tokenizers: Any, tokenizer: str) -> Any:
    try:
        return tokenizers.Tokenizer.from_str(_tokenizer_text(tokenizer))
    except UserError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"data.tokenizer {tokenizer} is no tokenizer.json that can be used: {error}") from error


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the others wait, also those of other runs."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file unlocks it
