"""The parameter sets have the shapes of the models they are named after."""

from math import prod

import pytest

from benchmarks.sets import SETS, numel


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("flat1b", 1, 2**30),
        ("llama1.4b", 1 + 4 * 9, 128256 * 4096 + 4 * 218_112_000),
        ("gpt2_124m", 148, 124_439_808),
        ("resnet50", 161, 25_557_032),
        ("resnet101", 314, 44_549_160),
        ("tiny2000", 2000, 8_192_000),
    ],
)
def test_set_counts(name: str, tensors: int, parameters: int) -> None:
    assert len(SETS[name]()) == tensors
    assert numel(name) == parameters


def test_resnet50_begins_and_ends_as_the_model_does() -> None:
    shapes = SETS["resnet50"]()
    assert shapes[:4] == [(64, 3, 7, 7), (64,), (64,), (64, 64, 1, 1)]
    assert (256, 64, 1, 1) in shapes  # the first shortcut
    assert shapes[-3:] == [(2048,), (1000, 2048), (1000,)]


def test_smoke_is_small_and_odd() -> None:
    shapes = SETS["smoke"]()
    assert sum(map(prod, shapes)) < 10_000
    assert any(len(s) > 1 and s[-1] % 32 for s in shapes)  # a partial group
    assert any(len(s) == 1 for s in shapes)  # a vector
