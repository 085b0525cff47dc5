"""Tokens of real text for the pretraining experiment: the Python sources that this interpreter's packages consist of.

Files are deduplicated by their content and split by file, so that no file of the validation part is ever trained on.
The tokenizer is a byte-level BPE trained on the training part. Which packages are installed decides what the tokens
are: a result names the checksum of the file that it used.

Usage: python -m benchmarks.quality.corpus [OUT.npz.xz] [--train-tokens N] [--val-tokens N]
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DEFAULT_PATH = Path(".quality/tokens.npz.xz")
VOCAB_SIZE = 16384
END_OF_FILE = VOCAB_SIZE - 1
SHORTEST, LONGEST = 200, 200_000  # characters: below are empty packages, above tables that a program wrote
TOKENIZER_FILES = 4000
HELD_OUT_SHARE = 0.05

Tokens = NDArray[np.uint16]


@dataclass(frozen=True)
class Corpus:
    """Token ids of both parts, files one after the other with :data:`END_OF_FILE` behind each, and a checksum."""

    train: Tokens
    val: Tokens
    checksum: str


def files() -> Iterator[str]:
    """The distinct texts of all Python files of this interpreter's library and packages, by path."""
    seen: set[bytes] = set()
    for root in dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")):
        for path in sorted(Path(root).rglob("*.py")):
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.sha256(text.encode()).digest()
            if SHORTEST <= len(text) <= LONGEST and digest not in seen:
                seen.add(digest)
                yield text


def build(train_tokens: int, val_tokens: int) -> Corpus:
    """Train the tokenizer and encode as many files as it takes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = list(files())
    random.Random(0).shuffle(texts)
    held_out = int(len(texts) * HELD_OUT_SHARE)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=END_OF_FILE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts[held_out : held_out + TOKENIZER_FILES], trainer)

    def encode(part: list[str], count: int) -> Tokens:
        ids: list[NDArray[np.uint16]] = []
        have = 0
        for i in range(0, len(part), 256):
            for encoded in tokenizer.encode_batch(part[i : i + 256]):
                ids.append(np.array([*encoded.ids, END_OF_FILE], dtype=np.uint16))
                have += len(ids[-1])
            if have >= count:
                break
        if have < count:
            raise ValueError(f"the installed packages give {have} tokens, {count} were asked for")
        return np.concatenate(ids)[:count]

    train, val = encode(texts[held_out:], train_tokens), encode(texts[:held_out], val_tokens)
    return Corpus(train, val, checksum(train, val))


def checksum(train: Tokens, val: Tokens) -> str:
    """Eight hexadecimal digits that name a corpus."""
    return hashlib.sha256(train.tobytes() + val.tobytes()).hexdigest()[:8]


def save(corpus: Corpus, path: Path) -> None:
    """Write a corpus; LZMA makes some 60 % of the ids' size of it."""
    import io
    import lzma

    buffer = io.BytesIO()
    np.savez(buffer, train=corpus.train, val=corpus.val)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=6))


def load(path: Path) -> Corpus:
    """Read what :func:`save` wrote."""
    import io
    import lzma

    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: make it with `python -m benchmarks.quality.corpus {path}`")
    arrays = np.load(io.BytesIO(lzma.decompress(path.read_bytes())))
    return Corpus(arrays["train"], arrays["val"], checksum(arrays["train"], arrays["val"]))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", nargs="?", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--train-tokens", type=int, default=30_000_000)
    parser.add_argument("--val-tokens", type=int, default=1_600_000)
    args = parser.parse_args()
    corpus = build(args.train_tokens, args.val_tokens)
    save(corpus, args.out)
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.1f} MiB, corpus {corpus.checksum}")


if __name__ == "__main__":
    main()
