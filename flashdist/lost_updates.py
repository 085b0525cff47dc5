"""What ``check_numerics=True`` raises."""

from __future__ import annotations

from collections.abc import Iterable

NAMED = 8


class NumericsError(RuntimeError):
    """Raised by ``check_numerics=True``: the updates of more than half of a tensor are lost in rounding."""


def report_lost(counted: Iterable[tuple[str, int, int]], of_what: str) -> None:
    """Raise where most of a tensor is lost.

    Args:
        counted: how a message calls a tensor, its elements whose update was lost, and all of its elements.
        of_what: what is counted, for the message.

    Raises:
        NumericsError: naming the first of these tensors, and the remedy.
    """
    bad = [f"{name}: {count} of {numel}" for name, count, numel in counted if 2 * count > numel]
    if bad:
        more = f"; and {len(bad) - NAMED} more tensors" if len(bad) > NAMED else ""
        raise NumericsError(
            f"updates are too small for the stored weights and were lost ({of_what}): "
            f"{'; '.join(bad[:NAMED])}{more}. Use master_weight_bits=32 for these parameters, or a larger lr."
        )
