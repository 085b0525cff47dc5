"""From a YAML file and overrides on the command line to a frozen tree of dataclasses, every value checked.

    @dataclass(frozen=True)
    class Train:
        steps: int = 1000

    @dataclass(frozen=True)
    class Config:
        train: Train = Train()

    config = load(Config, Path("run.yaml"), ["train.steps=100"])

What is wrong raises a `UserError`: one line that names the key, the value and the remedy. The scripts print it and end
with exit code 2.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from needed import EXIT_CODE as EXIT_CODE
from needed import missing

try:
    import yaml
except ModuleNotFoundError as error:
    missing("demo", error)

T = TypeVar("T")

# What PyYAML raises for what it cannot build: besides its own errors a date like 2024-13-45, `!!int abc`, a list as a
# key, a number of 5,000 digits, brackets a thousand deep.
NO_YAML = (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


class UserError(Exception):
    """A mistake in what the user gave; its text is one line that says what to do."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A safe loader that refuses a key written twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # PyYAML 6.0.4 gets merges of merges wrong, silently
                raise yaml.constructor.ConstructorError(
                    None, None, "merge keys (<<) are not taken: write the keys out", key_node.start_mark
                )
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return dict(super().construct_mapping(node, deep))


def load(cls: type[T], path: Path | None, overrides: Sequence[str] = ()) -> T:
    """Builds a config.

    Args:
        cls: a frozen dataclass whose fields are such dataclasses or values (bool, int, float, str, Path, Literal,
            tuples of these, each also `| None`). What is not given takes the field's default.
        path: a YAML file; None for the defaults alone.
        overrides: `key.of.a.field=value`, applied after the file, the last one wins.

    Raises:
        UserError: an unreadable file, an unknown key, a value of another type, or a ValueError of a `__post_init__`.
    """
    tree = read_yaml(path) if path is not None else {}
    for override in overrides:
        _apply(tree, override)
    return build(cls, tree)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {_reason(error)}") from error
    try:
        tree = yaml.load(text, _Loader)  # a subclass of SafeLoader
    except NO_YAML as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        place = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        raise UserError(f"{place}: no valid YAML: {' '.join(str(problem).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold `key: value` lines, but holds a {type(tree).__name__}")
    return tree


def build(cls: type[T], tree: dict[Any, Any], place: str = "") -> T:
    """An instance of a dataclass from a mapping; `place` is the dotted key of the mapping itself."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    for key in tree:
        if key not in names:
            raise UserError(_unknown_key(place, str(key), names))
    values = {name: _convert(tree[name], hints[name], _join(place, name)) for name in names if name in tree}
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(f"{place}: {error}" if place else str(error)) from error
    except TypeError as error:
        missing = [
            field.name
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]
            if field.init
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
            and field.name not in values
        ]
        if not missing:
            raise
        raise UserError(f"{_join(place, missing[0])} is missing: it has no default") from error


def to_tree(config: Any) -> dict[str, Any]:
    """The config as a mapping of plain YAML values; `build` makes an equal config of it."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, tuple | list):
            return [plain(inner) for inner in value]
        return str(value) if isinstance(value, Path) else value

    return {key: plain(value) for key, value in dataclasses.asdict(config).items()}


def to_yaml(config: Any) -> str:
    """The config as the text of a YAML file that `load` reads back."""
    return str(yaml.safe_dump(to_tree(config), sort_keys=False))


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"{override!r} is no override: write key.of.a.field=value, such as train.steps=100")
    try:
        value = yaml.load(text, _Loader)
    except NO_YAML:
        value = text  # such as *.txt, which would be a reference
    *sections, last = key.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        if inner is None:  # a section with no line below it
            inner = tree[section] = {}
        if not isinstance(inner, dict):
            raise UserError(f"{key}: {section} is a value, not a section")
        tree = inner
    tree[last] = value


def _convert(value: Any, hint: Any, key: str) -> Any:
    """`value` as the type `hint` asks for; YAML's own types are taken as they are, nothing is guessed."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _convert(value, next(a for a in arguments if a is not type(None)), key)
    if dataclasses.is_dataclass(hint):
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise UserError(f"{key} is a section: write its keys below it, not {value!r}")
        return build(typing.cast(type[Any], hint), value, key)
    if origin is typing.Literal:
        if value not in arguments:
            near = _nearest(str(value), [str(a) for a in arguments])
            raise UserError(f"{key} must be one of {', '.join(map(str, arguments))}; got {value!r}{near}")
        return value
    if origin is tuple:
        if not isinstance(value, list) or (arguments[-1] is not ... and len(value) != len(arguments)):
            raise UserError(f"{key} must be a list of {len(arguments)} values, got {value!r}")
        inner = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        return tuple(_convert(v, a, f"{key}[{i}]") for i, (v, a) in enumerate(zip(value, inner, strict=True)))
    return _convert_scalar(value, hint, key)


def _convert_scalar(value: Any, hint: Any, key: str) -> Any:
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads 1e-4, without a dot, as text.
        try:
            return float(value)
        except ValueError:
            pass
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is int and isinstance(value, str):
        try:
            return int(float(value)) if float(value).is_integer() else _refuse(value, hint, key)
        except (ValueError, OverflowError):
            pass
    if hint is Path and isinstance(value, str):
        return Path(value).expanduser()
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, bool) is (hint is bool) and isinstance(value, hint):
        return value
    return _refuse(value, hint, key)


def _refuse(value: Any, hint: Any, key: str) -> Any:
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    raise UserError(f"{key} must be {kinds.get(hint, hint)}, got {value!r}")


def _unknown_key(place: str, key: str, names: list[str]) -> str:
    where = f"section {place}" if place else "the config"
    return f"unknown key {_join(place, key)!r}{_nearest(key, names)}; {where} has {', '.join(names)}"


def _nearest(word: str, words: list[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
