"""Which parameter an optimizer's state number belongs to.

torch's optimizers number parameters group by group in the order they were given, and keep no names unless they were
given ``named_parameters()``. The order of a model's state dict is that of ``model.parameters()``; within a param group
the parameters are taken to stand in that order too. Where shapes leave more than one way, it is an error, not a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Shape = tuple[int, ...]


def match(
    candidates: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Shape | None]], what: str
) -> list[list[str]]:
    """Names for the numbered parameters of groups.

    Args:
        candidates: names and shapes of the model's tensors in order.
        groups: for each group the shapes of its parameters in order; None for one without a state.
        what: how messages call the file.

    Returns:
        Names, group by group.

    Raises:
        ValueError: the shapes fit in no way, or in several.
    """
    sizes = tuple(len(group) for group in groups)
    # From each (candidates left out of sight, places in the groups): how many ways lead here, two standing for many.
    ways: list[dict[tuple[int, ...], int]] = [{(0,) * len(groups): 1}]
    for i, (_, shape) in enumerate(candidates):
        reached: dict[tuple[int, ...], int] = {}
        left = len(candidates) - i - 1
        for places, count in ways[-1].items():
            steps = [places]
            steps += [
                _advanced(places, g) for g, at in enumerate(places) if at < sizes[g] and _fits(groups[g][at], shape)
            ]
            for step in steps:
                if sum(sizes) - sum(step) <= left:
                    reached[step] = min(reached.get(step, 0) + count, 2)
        ways.append(reached)
    if sizes not in ways[-1]:
        raise ValueError(
            f"the optimizer's {sum(sizes)} parameters in {what} do not fit the model's {len(candidates)} tensors in "
            "their order: give the model it was trained with by --weights, or the parameters' names, one a line, in "
            "the optimizer's order by --names FILE"
        )
    if ways[-1][sizes] > 1:
        raise ValueError(
            f"the optimizer in {what} keeps no names, and its {sum(sizes)} parameters fit the model's tensors in more "
            "than one way: give their names, one a line, in the optimizer's order by --names FILE"
        )
    return _walk_back(candidates, groups, ways)


def _walk_back(
    candidates: Sequence[tuple[str, Shape]],
    groups: Sequence[Sequence[Shape | None]],
    ways: list[dict[tuple[int, ...], int]],
) -> list[list[str]]:
    names: list[list[str]] = [[] for _ in groups]
    places = tuple(len(group) for group in groups)
    for i in reversed(range(len(candidates))):
        if places in ways[i] and ways[i][places]:
            continue
        for g, at in enumerate(places):
            before = (*places[:g], at - 1, *places[g + 1 :])
            if at and before in ways[i] and _fits(groups[g][at - 1], candidates[i][1]):
                names[g].insert(0, candidates[i][0])
                places = before
                break
    return names


def _advanced(places: tuple[int, ...], g: int) -> tuple[int, ...]:
    return (*places[:g], places[g] + 1, *places[g + 1 :])


def _fits(wanted: Shape | None, shape: Shape) -> bool:
    return wanted is None or wanted == shape


def read_names(path: Path, count: int) -> list[str]:
    """The names of a --names file.

    Raises:
        ValueError: there is no such file, or it has another number of names.
    """
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--names {path} cannot be read ({error}): give a text file with one name a line") from error
    if len(names) != count or len(set(names)) != count:
        raise ValueError(
            f"--names {path} has {len(names)} names ({len(set(names))} different), the optimizer {count} parameters: "
            "give each parameter's name once, one a line, in the optimizer's order"
        )
    return names
