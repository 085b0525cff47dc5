"""Text that every Python installation carries, as bytes, split into training and validation parts.

There are two sources: the language reference in `pydoc_data.topics` (English prose, 0.5 MB) and the standard library's
own modules (some 9 MB of Python, varying with its version). One token is one byte, so there is no tokenizer and the
vocabulary is 256.
"""

from __future__ import annotations

import importlib
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCAB_SIZE = 256
# Folders of the standard library that are third-party, machine-made tables or present only in some installations.
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "lib2to3",
    "idlelib",
}


@dataclass(frozen=True)
class Corpus:
    """The two parts as one-dimensional uint8 tensors; no document is in both."""

    train: Tensor
    validation: Tensor


def prose() -> dict[str, bytes]:
    """The topics of Python's language reference, by name."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return {f"topic:{name}": text.encode() for name, text in topics.items()}


def sources() -> dict[str, bytes]:
    """The standard library's modules, by their path inside it."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return {path.as_posix(): (root / path).read_bytes() for path in paths if LEFT_OUT.isdisjoint(path.parts)}


def load_corpus(documents: dict[str, bytes] | None = None, *, validation_share: int = 10) -> Corpus:
    """Builds the corpus; one document in `validation_share` goes to validation, chosen by its name alone.

    Arguments:
        documents: texts by name; None takes `prose()` and `sources()`.
        validation_share: 10 means about a tenth of the documents.
    Returns:
        The corpus, the same on every call.
    """
    if documents is None:
        documents = prose() | sources()
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for name in sorted(documents):
        # A checksum, because Python's own hash of a string differs from run to run.
        held_out = zlib.crc32(name.encode()) % validation_share == 0
        parts[held_out].append(documents[name])
    train, validation = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return Corpus(train, validation)


def batches(tokens: Tensor, *, batch: int, context: int, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields `steps` pairs of inputs and targets, cut at random places that depend on the seed alone.

    Arguments:
        tokens: one part of a corpus.
        batch, context: B sequences of T tokens a pair.
    Returns:
        Pairs of int64 tensors (B, T); the target of a token is the one that follows it.
    """
    if len(tokens) <= context:
        raise ValueError(f"a text of {len(tokens)} tokens is too short for a context of {context}")
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - context, (batch, 1), generator=generator)
        windows = tokens[starts + offsets].long()  # (B, T + 1)
        yield windows[:, :-1], windows[:, 1:]
