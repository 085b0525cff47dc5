"""What a DeepSpeed engine has saved of an AdamW of torch's or its own, at ZeRO stages 1 to 3: fp32 in flat partitions.

At stages 1 and 2 each file says where a parameter's elements lie in it. At stage 3 every parameter is cut into as many
equal parts as there are ranks, which lie in the order in which the model's file lists the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashdist.convert.contents import MOMENTS, AdamState, Item

_STAGE_2, _STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_REFUSED = {"amsgrad": True, "decoupled_weight_decay": False, "bias_correction": False}


@dataclass(frozen=True)
class _Part:
    """Elements of a parameter in a partition: the partition's tensors, and from where to where they lie in them."""

    master: Tensor
    state: dict[str, Any]
    begin: int
    numel: int

    def values(self, key: str | None) -> Tensor:
        flat: Tensor = self.master if key is None else self.state[key]
        return flat.view(-1)[self.begin : self.begin + self.numel]


Shapes = dict[str, tuple[int, ...]]


class StockPartitions:
    """The partitions of all ranks.

    Attributes:
        groups: param groups as they were saved.
        partition_of: place of the partition that each parameter lies in.
        parts: each parameter's parts in their order.
    """

    def __init__(self, saved: Sequence[dict[str, Any]], shapes: Shapes, what: str) -> None:
        """Find the parameters in what the files of all ranks hold.

        Raises:
            ValueError: an optimizer other than AdamW, an option that ours does not have, or parts that are missing.
        """
        self.what = what
        self.parts: dict[str, list[_Part]] = {}
        self.partition_of: dict[str, int] = {}
        self.groups: list[dict[str, Any]] = []
        for rank in saved:
            base = rank.get("base_optimizer_state", rank.get("optimizer_state_dict"))
            if not isinstance(base, dict) or not isinstance(base.get("state"), dict):
                raise ValueError(
                    f"{what} is elastic, or no ZeRO checkpoint: convert it by DeepSpeed's ds_to_universal.py"
                )
            self.groups = self.groups or base["param_groups"]
            masters = rank.get(_STAGE_2) or rank.get(_STAGE_3)
            if not isinstance(masters, list):
                raise ValueError(f"{what} holds no fp32 weights (looked for {_STAGE_2} and {_STAGE_3})")
            states = [base["state"].get(i, {}) for i in range(len(masters))]
            for state in states:
                self._check_state(state)
            places = self._named(rank) if _STAGE_2 in rank else _in_order(shapes, masters, len(saved), rank, what)
            for name, partition, begin, numel in places:
                self.partition_of[name] = partition
                part = _Part(masters[partition], states[partition], begin, numel)
                self._check_part(name, part)
                self.parts.setdefault(name, []).append(part)
        self._check_groups()
        for name, shape in shapes.items():
            held = sum(part.numel for part in self.parts.get(name, []))
            if held < math.prod(shape):
                raise ValueError(f"{what} is not whole: it has {held} elements of {name}, whose shape is {shape}")

    def _check_state(self, state: dict[str, Any]) -> None:
        odd = set(state) - {"step", *MOMENTS}
        if state and (odd or not set(MOMENTS) <= set(state)):
            raise ValueError(f"{self.what} has the state {sorted(state)}: only AdamW's is converted")

    def _check_groups(self) -> None:
        for group in self.groups:
            for key, value in _REFUSED.items():
                if group.get(key) is value:
                    raise ValueError(
                        f"{self.what} is of an optimizer with {key}={value}, which FlashAdamW does not have: go on "
                        "from the weights alone (DeepSpeed's zero_to_fp32.py)"
                    )

    def _check_part(self, name: str, part: _Part) -> None:
        for key in (None, *(key for key in MOMENTS if key in part.state)):
            if part.values(key).numel() != part.numel:
                raise ValueError(
                    f"{self.what} is damaged: {key or 'the weight'} of {name} ends outside of its partition"
                )

    def _named(self, rank: dict[str, Any]) -> Iterator[tuple[str, int, int, int]]:
        mappings = rank.get("param_slice_mappings")
        if not isinstance(mappings, list):
            raise ValueError(
                f"{self.what} does not say where its parameters lie (param_slice_mappings): it is of an old release of "
                "DeepSpeed, load and save it with a newer one"
            )
        for partition, mapping in enumerate(mappings):
            for name, place in mapping.items():
                yield name, partition, place.start, place.numel

    def item(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Item:
        """A parameter with its state."""
        parts, numel = self.parts[name], math.prod(shape)

        def whole(key: str | None) -> Tensor:
            joined = torch.cat([part.values(key).to(torch.float32) for part in parts])
            return joined[:numel].clone().view(shape)

        step = parts[0].state.get("step", self.groups[0].get("step", 0))
        state = AdamState(float(step), lambda place: whole(MOMENTS[place])) if parts[0].state else None
        return Item(name, shape, dtype, lambda: whole(None).to(dtype), lambda: whole(None), state)


def is_stock(saved: dict[str, Any]) -> bool:
    """Whether a rank's optimizer entry has fp32 weights as DeepSpeed itself keeps them."""
    return _STAGE_2 in saved or _STAGE_3 in saved


def _in_order(
    shapes: Shapes, masters: list[Tensor], ranks: int, rank: dict[str, Any], what: str
) -> Iterator[tuple[str, int, int, int]]:
    """Where the parameters lie at stage 3."""
    if rank.get("ds_zero_partition_groups") is not None:
        raise ValueError(
            f"{what} was partitioned over several groups of ranks: make fp32 weights of it by DeepSpeed's "
            "zero_to_fp32.py"
        )
    partition, begin = 0, 0
    for name, shape in shapes.items():
        numel = math.ceil(math.prod(shape) / ranks)
        while partition < len(masters) and begin == masters[partition].numel():
            partition, begin = partition + 1, 0
        if partition == len(masters):
            raise ValueError(f"{what} is not whole: the partitions end before {name}")
        yield name, partition, begin, numel
        begin += numel
