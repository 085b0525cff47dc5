"""Whether a tensor is a DTensor, without importing torch.distributed.tensor: where nobody has, there is none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from flashdist.lazy import loaded_class

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Whether it is a DTensor."""
    dtensor = loaded_class("torch.distributed.tensor", "DTensor")
    return dtensor is not None and isinstance(tensor, dtensor)


def any_dtensor(tensors: Iterable[object]) -> bool:
    """Whether one of them is a DTensor."""
    dtensor = loaded_class("torch.distributed.tensor", "DTensor")
    # By their few types: of thousands of parameters one by one, this is asked in every step.
    return dtensor is not None and any(issubclass(kind, dtensor) for kind in set(map(type, tensors)))
