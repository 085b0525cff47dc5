"""Random trainings: the kernels against the eager step, whatever shapes, settings and events come together.

The small runs are part of every test run; ``-m slow`` runs many more.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from flashdist import FlashOptimizer
from flashdist.kernels import eager
from tests.conftest import BACKENDS, needs_compiler
from tests.support.backends import FP32, assert_same_bits, snapshot
from tests.support.fuzz import EVENTS, Training, run, trainings
from tests.support.parity import assert_parity

# After a comparison the Triton twin goes on from the eager one's state and has forgotten what its weights were.
WITHOUT_REPLACING = [e for e in EVENTS if e != "replace"]


def sized(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
    )


def check_triton(training: Training) -> None:
    run(training, [BACKENDS["eager"], BACKENDS["triton"]], assert_parity)


@sized(20)
@given(trainings(3, WITHOUT_REPLACING))
def test_triton_against_eager(training: Training):
    check_triton(training)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@sized(400)
@given(trainings(4, WITHOUT_REPLACING))
def test_triton_against_eager_at_length(training: Training):
    check_triton(training)


def alike(one: FlashOptimizer, other: FlashOptimizer) -> None:
    """All bits but those of NaNs."""
    for i, (a, b) in enumerate(zip(snapshot(one), snapshot(other), strict=True)):
        assert a.keys() == b.keys(), f"parameter {i}"
        for key in a:
            found, expected = (torch.where(x.isnan(), 0.5, x) if x.is_floating_point() else x for x in (b[key], a[key]))
            assert_same_bits(found, expected, f"{key} of parameter {i} of shape {tuple(a['weight'].shape)}")


@pytest.fixture
def exact_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    """``numerics/`` alone with roots that are rounded correctly, as the C++ kernel's are."""
    root = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: root(x.double()).float() if x.dtype == FP32 else root(x))
    monkeypatch.setattr(eager, "step_in_place", lambda block, buffers: False)


@needs_compiler
@sized(60)
@given(trainings(3))
def test_native_has_the_bits_of_numerics(exact_numerics: None, training: Training):
    run(training, [BACKENDS["eager"], BACKENDS["native"]], alike)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@needs_compiler
@sized(1500)
@given(trainings(5))
def test_native_has_the_bits_of_numerics_at_length(exact_numerics: None, training: Training):
    run(training, [BACKENDS["eager"], BACKENDS["native"]], alike)
