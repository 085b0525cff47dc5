"""memory_summary counts live storages: each once, whole, under the right kind."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from flashdist.memory import MemorySummary, state_kind, summarize


def weights_only(*weights: Tensor) -> MemorySummary:
    return summarize(weights, [], [], [])


def test_every_kind_of_an_adamw_tensor():
    state = [
        ("step", torch.zeros((), dtype=torch.int64)),
        ("error", torch.zeros(64, 32, dtype=torch.int8)),
        ("exp_avg", torch.zeros(64, 32, dtype=torch.int8)),
        ("exp_avg_scale", torch.zeros(64, 1, dtype=torch.bfloat16)),
        ("exp_avg_sq", torch.zeros(64, 32, dtype=torch.uint8)),
        ("exp_avg_sq_scale", torch.zeros(64, 1)),
    ]
    weight = torch.zeros(64, 32, dtype=torch.bfloat16)
    summary = summarize([weight], [torch.zeros_like(weight)], state, [torch.zeros(3, dtype=torch.int32)])
    n = 64 * 32
    assert summary == MemorySummary(
        weights=2 * n,
        corrections=n,
        moments=2 * n,
        scales=64 * 2 + 64 * 4,
        steps=8,
        gradients=2 * n,
        derived=12,
        parameters=n,
    )
    assert summary.total == 7 * n + 384 + 8 + 12
    # The table of bytes per parameter in the design says 7.1875; the rest is the step and the derived state.
    assert summary.bytes_per_parameter == pytest.approx(7.1875 + 20 / n, abs=0)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("step", "steps"),
        ("error", "corrections"),
        ("exp_avg", "moments"),
        ("exp_avg_sq", "moments"),
        ("momentum_buffer", "moments"),
        ("exp_avg_scale", "scales"),
        ("exp_avg_sq_scale", "scales"),
        ("momentum_buffer_scale", "scales"),
    ],
)
def test_state_keys(key: str, kind: str):
    assert state_kind(key) == kind
    summary = summarize([], [], [(key, torch.zeros(5, dtype=torch.int8))], [])
    assert getattr(summary, kind) == summary.total == 5


def test_a_weight_listed_twice_counts_once():
    weight = nn.Parameter(torch.zeros(8, 4))
    assert weights_only(weight, weight) == weights_only(weight) == MemorySummary(weights=128, parameters=32)


def test_a_second_object_on_the_same_view_counts_once():
    weight = nn.Parameter(torch.zeros(8, 4))
    assert weights_only(weight, nn.Parameter(weight.data)) == MemorySummary(weights=128, parameters=32)


def test_slices_of_one_storage_count_it_once_and_whole():
    flat = torch.zeros(100)
    summary = weights_only(flat[:30], flat[30:50].view(4, 5))
    assert summary == MemorySummary(weights=400, parameters=50)


def test_equal_slices_at_different_places_are_different_parameters():
    flat = torch.zeros(20)
    assert weights_only(flat[:10], flat[10:]).parameters == 20


def test_a_view_holds_its_whole_storage():
    assert summarize([], [torch.zeros(10, 10)[0]], [], []).gradients == 400
    assert summarize([], [torch.zeros(1).expand(1000)], [], []).gradients == 4


def test_views_of_another_dtype_share_the_storage():
    codes = torch.zeros(16, dtype=torch.uint8)
    summary = summarize([], [], [("exp_avg_sq", codes[:8]), ("exp_avg_sq_scale", codes[8:].view(torch.float32))], [])
    assert (summary.moments, summary.scales) == (16, 0)


def test_a_storage_of_two_kinds_goes_to_the_first():
    packed = torch.zeros(4, dtype=torch.int32)
    summary = summarize([], [], [("step", packed[0]), ("step", packed[1])], [packed])
    assert (summary.steps, summary.derived) == (16, 0)


def test_temporaries_do_not_hide_one_another():
    # Each tensor is freed as soon as the generator goes on, unless its storage is kept: then the allocator hands the
    # same address to the next one, which would be taken for a view of the first.
    summary = summarize([], (torch.zeros(1000) for _ in range(20)), [], [])
    assert summary.gradients == 80_000


def test_meta_tensors_count_what_they_would_hold():
    a, b = torch.empty(8, 4, device="meta", dtype=torch.bfloat16), torch.empty(3, device="meta")
    assert weights_only(a, b) == MemorySummary(weights=64 + 12, parameters=35)
    assert weights_only(a, a) == MemorySummary(weights=64, parameters=32)


def test_empty_shards():
    summary = weights_only(torch.zeros(0, 4), torch.zeros(0), torch.zeros(2))
    assert summary == MemorySummary(weights=8, parameters=2)


def test_a_dtensor_counts_its_local_shard(fake_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (4,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(10, 6), mesh, [Shard(0)]))
    assert weight.shape == (10, 6)
    local = weight.to_local().numel()  # rank 0 of 4 holds 3 of 10 rows, perhaps as a view of the whole
    summary = weights_only(weight)
    assert summary.parameters == local == 18
    assert summary.weights == weight.to_local().untyped_storage().nbytes()


@pytest.fixture
def fake_group():
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_another_unwrapping_can_be_given():
    weight = torch.zeros(10)
    summary = summarize([weight], [], [], [], local=lambda tensor: tensor[:2].clone())
    assert summary == MemorySummary(weights=8, parameters=2)


def test_nothing_at_all():
    summary = summarize([], [], [], [])
    assert summary == MemorySummary()
    assert summary.total == 0
    assert summary.bytes_per_parameter == 0.0
    assert "0.0000" in str(summary)


def test_as_dict_has_the_fields_and_the_sums():
    summary = MemorySummary(1, 2, 3, 4, 5, 6, 7, parameters=14)
    assert summary.as_dict() == {
        "weights": 1,
        "corrections": 2,
        "moments": 3,
        "scales": 4,
        "steps": 5,
        "gradients": 6,
        "derived": 7,
        "parameters": 14,
        "total": 28,
        "bytes_per_parameter": 2.0,
    }


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MemorySummary().weights = 1  # type: ignore[misc]


def test_the_table():
    summary = MemorySummary(2_000_000, 1_000_000, 2_000_000, 187_500, 8, 2_000_000, 4_000, parameters=1_000_000)
    assert str(summary) == "\n".join(
        [
            "kind             bytes  bytes/parameter",
            "weights      2,000,000           2.0000",
            "corrections  1,000,000           1.0000",
            "moments      2,000,000           2.0000",
            "scales         187,500           0.1875",
            "steps                8           0.0000",
            "gradients    2,000,000           2.0000",
            "derived          4,000           0.0040",
            "total        7,191,508           7.1915",
            "parameters   1,000,000",
        ]
    )
