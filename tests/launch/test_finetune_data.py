"""Records, answers and packing."""

from __future__ import annotations

import pytest
import torch
from chunked_loss import IGNORE
from config import UserError
from finetune_data import Document, order, pack, read_documents, split, to_document
from finetune_model import loss_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import finetuning


@pytest.fixture(scope="module")
def tokenizer():
    return finetuning.tokenizer()


def learned_text(document, tokenizer):
    return tokenizer.decode([t for t, learned in zip(document.tokens, document.learned, strict=True) if learned])


def test_the_answers_alone_are_learned(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes, ünö."},
        {"role": "user", "content": "assistant\nTwo?"},
        {"role": "assistant", "content": " No "},
    ]
    document = to_document({"messages": messages}, tokenizer)
    assert learned_text(document, tokenizer) == "Yes, ünö.<|im_end|> No <|im_end|>"
    assert tokenizer.decode(document.tokens) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_a_text_is_learned_wholly(tokenizer):
    document = to_document({"text": "ab"}, tokenizer)
    assert tokenizer.decode(document.tokens) == "ab<|im_end|>"
    assert all(document.learned)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "?"}, "a record is"),
        ([], "a record is"),
        ({"messages": [{"role": "user"}]}, "a record is"),
        ({"text": " "}, "empty text"),
        ({"messages": [{"role": "user", "content": "hm"}]}, "nothing to learn"),
        ({"messages": []}, "nothing to learn"),
        ({"messages": [{"role": "assistant", "content": "hm"}]}, "begins with the assistant"),
    ],
)
def test_no_records(tokenizer, record, message):
    with pytest.raises(UserError, match=message):
        to_document(record, tokenizer)


def test_a_template_that_rewrites_earlier_turns(tokenizer):
    kept = tokenizer.chat_template
    tokenizer.chat_template = "{{ messages|length }}" + kept
    try:
        with pytest.raises(UserError, match="changes earlier turns"):
            to_document(finetuning.questions(1)[0], tokenizer)
    finally:
        tokenizer.chat_template = kept


def test_mistakes_in_a_file_name_the_line(tmp_path, tokenizer):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": \n')
    with pytest.raises(UserError, match="line 3: no valid JSON"):
        read_documents(path, tokenizer)
    path.write_text("\n")
    with pytest.raises(UserError, match="no records"):
        read_documents(path, tokenizer)
    with pytest.raises(UserError, match="cannot be read"):
        read_documents(tmp_path / "y.jsonl", tokenizer)


documents = st.lists(
    st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=20
)


@given(documents, st.integers(2, 16))
@settings(max_examples=60, deadline=None)
def test_packing_keeps_every_target_once(sizes, length):
    """Token ids are unique, so that each target shows where it came from."""
    made, at = [], 1
    for size, prompt in sizes:
        made.append(Document(list(range(at, at + size)), [i >= prompt for i in range(size)]))
        at += size
    expected = set()
    for document in made:
        starts = range(0, len(document.tokens), length) if all(document.learned) else [0]
        for start in starts:
            tokens, learned = document.tokens[start : start + length], document.learned[start : start + length]
            expected |= {
                (a, b) for a, b, is_target in zip(tokens[:-1], tokens[1:], learned[1:], strict=True) if is_target
            }
    if not expected:
        with pytest.raises(UserError, match="no record has a token to learn"):
            pack(made, length, padding=0)
        return
    packing = pack(made, length, padding=0)
    rows = packing.rows
    pairs = zip(rows.tokens.flatten().tolist(), rows.targets.flatten().tolist(), strict=True)
    found = [(a, b) for a, b in pairs if b != IGNORE]
    assert len(found) == len(set(found)) == packing.targets
    assert set(found) == expected
    # A position of 0 starts a record; within one, positions and ids count on together.
    for tokens, positions in zip(rows.tokens.tolist(), rows.positions.tolist(), strict=True):
        for t in range(1, length):
            if positions[t] != 0 and tokens[t] != 0:
                assert positions[t] == positions[t - 1] + 1
                assert tokens[t] == tokens[t - 1] + 1


def test_packed_records_do_not_see_each_other(tokenizer):
    """The loss of a packed row is the mean over its records, each computed alone."""
    model = finetuning.model()
    documents = [to_document(record, tokenizer) for record in finetuning.questions(3)]
    together = pack(documents, 200, padding=0)
    assert len(together.rows) == 1
    alone = [pack([d], 80, padding=0) for d in documents]
    with torch.no_grad():
        expected = sum(loss_of(model, p.rows, "blocks") * p.targets for p in alone) / together.targets
        torch.testing.assert_close(loss_of(model, together.rows, "blocks"), expected, rtol=1e-5, atol=1e-5)


def test_held_out_records_and_their_order():
    documents = [Document([i], [True]) for i in range(10)]
    train, held_out = split(documents, 4)
    assert [d.tokens[0] for d in held_out] == [3, 7]
    assert len(train) == 8
    assert split(documents, 0) == (documents, [])
    steps = [next(order(5, 3, 1, t)) for t in range(5)]
    run = order(5, 3, 1, 0)
    assert all(torch.equal(next(run), step) for step in steps)
    assert sorted(torch.cat(steps).tolist()) == sorted([*range(5)] * 3)
