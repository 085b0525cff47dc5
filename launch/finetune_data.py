"""From JSONL records to rows of packed tokens, with a target wherever an answer's token is to be predicted.

A chat record is rendered by the tokenizer's template. Templates mostly have no marks for what the assistant says, so
the spans are found here: an answer begins where the conversation before it, with the template's opening for the
assistant, ends, and it ends where the conversation with it ends (the end-of-turn token is learned, white space after it
is not). Every token of a text record is a target.

Rows are filled with whole records. Positions start again at 0 in each record, from which transformers makes an
attention mask that keeps records apart.

Letters in the shape comments: B rows, T tokens in a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from chunked_loss import IGNORE
from config import UserError
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """One record: token ids, and for each token whether it is to be predicted from those before it."""

    tokens: list[int]
    learned: list[bool]


@dataclass(frozen=True)
class Rows:
    """Packed records, int64 (B, T) each: tokens, the target of each (IGNORE for none), positions inside records."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, which: Tensor) -> Rows:
        """Some of the rows."""
        return Rows(self.tokens[which], self.targets[which], self.positions[which])


def read_documents(path: Path, tokenizer: Any) -> list[Document]:
    """All records of a JSONL file.

    Raises:
        UserError: naming the line, for what is no record.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UserError(f"{path} cannot be read: {reason}") from error
    documents = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            documents.append(to_document(json.loads(line), tokenizer))
        except (ValueError, UserError) as error:
            what = f"no valid JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise UserError(f"{path}, line {number}: {what}") from error
    if not documents:
        raise UserError(f"{path} has no records")
    return documents


def to_document(record: Any, tokenizer: Any) -> Document:
    """One record.

    Raises:
        UserError: it is neither chat nor text, or has nothing to learn.
    """
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        if not record["text"].strip():
            raise UserError("an empty text")
        tokens = list(tokenizer(record["text"])["input_ids"])  # with a first token where the model has one
        if tokenizer.eos_token_id not in (None, tokens[-1]):
            tokens.append(tokenizer.eos_token_id)
        return Document(tokens, [True] * len(tokens))
    messages = record.get("messages") if isinstance(record, dict) else None
    chat = isinstance(messages, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)
    if not chat:
        raise UserError('a record is {"messages": [{"role": ..., "content": ...}, ...]} or {"text": ...}')
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("a chat record, but the tokenizer has no chat template: give text records")
    assert isinstance(messages, list)
    return chat_document(messages, tokenizer)


def chat_document(messages: Sequence[dict[str, Any]], tokenizer: Any) -> Document:
    """A conversation, whose answers are learned."""
    if messages and messages[0]["role"] == "assistant":
        raise UserError("the conversation begins with the assistant, who has nothing to answer: begin with the user")
    whole = render(messages, tokenizer)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:i], tokenizer, opening=True), render(messages[: i + 1], tokenizer)
        if not (after.startswith(before) and whole.startswith(after)):
            raise UserError(
                "the chat template changes earlier turns when later ones are added, so the answers cannot be found in "
                "it: give one question and answer a record, or text records"
            )
        spans.append((len(before), len(after.rstrip())))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    learned = [any(start <= a and a < end for start, end in spans) for a, _ in encoded["offset_mapping"]]
    if not any(learned):
        raise UserError("no message of the role assistant with something in it: there is nothing to learn")
    return Document(list(encoded["input_ids"]), learned)


def render(messages: Sequence[dict[str, Any]], tokenizer: Any, opening: bool = False) -> str:
    """A conversation as text; with `opening` up to where the assistant begins to speak."""
    if not messages:
        return ""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opening))
    except Exception as error:  # templates raise whatever they like, and jinja2 its own
        raise UserError(f"the chat template refuses the conversation: {' '.join(str(error).split())}") from error


@dataclass
class Packing:
    """What became of the records."""

    rows: Rows
    records: int
    cut: int
    dropped: int
    filled: float
    targets: int


def pack(documents: Sequence[Document], length: int, padding: int) -> Packing:
    """Fill rows of `length` tokens with records in their order, the next one that fits first.

    Longer records are cut: of texts every piece is kept, of chats the first. Pieces without a target are dropped.

    Raises:
        UserError: nothing is left to learn.
    """
    pieces: list[Document] = []
    cut = dropped = 0
    for document in documents:
        size = len(document.tokens)
        starts = range(0, size, length) if all(document.learned) else range(1)
        cut += size > length
        for start in starts:
            piece = Document(document.tokens[start : start + length], document.learned[start : start + length])
            # A piece's first token has nothing before it to be predicted from.
            if any(piece.learned[1:]):
                pieces.append(piece)
            else:
                dropped += 1
    if not pieces:
        raise UserError(f"no record has a token to learn within data.sequence={length} tokens: make it longer")
    rows: list[list[Document]] = []
    room: list[int] = []
    first = 0  # rows before it are full, or nearly
    for piece in pieces:
        size = len(piece.tokens)
        place = next((r for r in range(first, len(rows)) if room[r] >= size), None)
        if place is None:
            rows.append([])
            room.append(length)
            place = len(rows) - 1
            first = max(first, place - 64)
        rows[place].append(piece)
        room[place] -= size
    packed = Rows(*(torch.stack(part) for part in zip(*(_row(row, length, padding) for row in rows), strict=True)))
    targets = int((packed.targets != IGNORE).sum())
    return Packing(packed, len(documents), cut, dropped, 1 - sum(room) / (len(rows) * length), targets)


def _row(pieces: Sequence[Document], length: int, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.full((length,), padding, dtype=torch.int64)
    targets = torch.full((length,), IGNORE, dtype=torch.int64)
    positions = torch.arange(length)
    at = 0
    for piece in pieces:
        size = len(piece.tokens)
        ids = torch.tensor(piece.tokens)
        tokens[at : at + size] = ids
        learned = torch.tensor(piece.learned)[1:]
        targets[at : at + size - 1] = torch.where(learned, ids[1:], IGNORE)
        positions[at : at + size] = torch.arange(size)
        at += size
    positions[at:] = torch.arange(length - at)  # the padding is a record of its own
    return tokens, targets, positions


def split(documents: Sequence[Document], share: int) -> tuple[list[Document], list[Document]]:
    """Training and held-out records: every `share`-th is held out."""
    held_out = {i for i in range(len(documents)) if share and i % share == share - 1}
    return [d for i, d in enumerate(documents) if i not in held_out], [documents[i] for i in sorted(held_out)]


def order(num_rows: int, batch: int, seed: int, start: int) -> Iterator[Tensor]:
    """The rows of step `start` and all that follow, without end; each pass over the data has an order of its own.

    A step's rows depend on the seed and the step alone, so that a resumed run goes on with what would have come.
    """
    at = start * batch
    while True:
        wanted = range(at, at + batch)
        epochs = {i // num_rows: torch.Tensor() for i in wanted}
        for epoch in epochs:
            epochs[epoch] = torch.randperm(num_rows, generator=torch.Generator().manual_seed((seed << 32) + epoch))
        yield torch.stack([epochs[i // num_rows][i % num_rows] for i in wanted])
        at += batch
