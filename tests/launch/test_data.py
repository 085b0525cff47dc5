from __future__ import annotations

import pytest
import torch
from data import VOCAB_SIZE, batches, load_corpus, prose, sources

DOCUMENTS = {f"document {i}": f"text of document {i};".encode() for i in range(200)}


def test_the_bundled_text_is_large_and_mostly_printable():
    corpus = load_corpus()
    assert len(corpus.train) > 4_000_000
    assert len(corpus.train) > 5 * len(corpus.validation) > 1_000_000
    assert corpus.train.dtype == torch.uint8
    assert VOCAB_SIZE == 256
    printable = (corpus.train == 10) | ((corpus.train >= 32) & (corpus.train < 127))
    assert printable.double().mean() > 0.98


def test_both_sources_are_there_and_no_third_party_package():
    assert len(prose()) > 50
    names = sources()
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not any("site-packages" in name for name in names)


def test_every_document_is_whole_and_in_exactly_one_part():
    corpus = load_corpus(DOCUMENTS)
    train = bytes(corpus.train.tolist())
    validation = bytes(corpus.validation.tolist())
    assert all((text in train) + (text in validation) == 1 for text in DOCUMENTS.values())
    held_out = sum(text in validation for text in DOCUMENTS.values())
    assert 10 <= held_out <= 30


def test_the_split_does_not_depend_on_the_order_or_on_the_other_documents():
    whole = load_corpus(DOCUMENTS)
    turned = load_corpus(dict(reversed(DOCUMENTS.items())))
    assert torch.equal(whole.train, turned.train)
    assert torch.equal(whole.validation, turned.validation)
    half = load_corpus({name: DOCUMENTS[name] for name in list(DOCUMENTS)[::2]})
    assert bytes(half.validation.tolist()).split(b"\n")[0] in bytes(whole.validation.tolist())


def test_targets_are_the_inputs_moved_by_one():
    text = torch.arange(100, dtype=torch.uint8)
    for x, y in batches(text, batch=4, context=10, steps=3, seed=0):
        assert x.shape == y.shape == (4, 10)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(y, x + 1)


def test_batches_depend_on_the_seed_alone():
    text = torch.arange(250, dtype=torch.uint8)

    def draw(seed: int) -> list[torch.Tensor]:
        torch.rand(3)  # the global generator must play no part
        return [x for x, _ in batches(text, batch=4, context=10, steps=5, seed=seed)]

    first, again, other = draw(0), draw(0), draw(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_every_window_can_be_drawn():
    text = torch.arange(12, dtype=torch.uint8)
    starts = {int(x[0, 0]) for x, _ in batches(text, batch=1, context=10, steps=50, seed=0)}
    assert starts == {0, 1}


def test_too_short_a_text_is_refused():
    with pytest.raises(ValueError, match="10 tokens is too short for a context of 10"):
        next(batches(torch.zeros(10, dtype=torch.uint8), batch=1, context=10, steps=1, seed=0))
