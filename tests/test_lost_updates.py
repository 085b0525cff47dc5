"""What ``check_numerics`` says of lost updates; that they are counted is tested with the step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashdist import NumericsError
from flashdist.integrations.deepspeed_state import FlatPartition
from flashdist.lost_updates import report_lost


def test_half_of_a_tensor_may_be_lost():
    report_lost([("a", 32, 64), ("b", 0, 5)], "elements")


def test_the_first_eight_are_named():
    with pytest.raises(NumericsError, match=r"\(elements\): t0: 33 of 64; .*t7: 33 of 64; and 2 more tensors\. Use"):
        report_lost([(f"t{i}", 33, 64) for i in range(10)], "elements")
    with pytest.raises(NumericsError, match=r"lost \(elements\): b: 3 of 5\. Use master_weight_bits=32"):
        report_lost([("a", 1, 64), ("b", 3, 5)], "elements")


def test_segments_of_a_deepspeed_partition_are_summed_by_parameter():
    segments = [SimpleNamespace(name=name, length=length) for name, length in (("w", 8), ("w", 64), ("b", 10))]
    counts = [torch.tensor(n) for n in (0, 40, 5)]
    with pytest.raises(NumericsError, match=r"\(elements on this rank\): w: 40 of 72\. Use"):
        FlatPartition._report_lost(SimpleNamespace(segments=segments), counts)
