"""What callers use says what it takes, gives and raises, and where its method comes from; all of it is annotated."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# Modules whose names are for callers: those in __all__, else the public ones that are defined there.
MODULES = [
    "flashdist",
    "flashdist.checkpoint",
    "flashdist.integrations.deepspeed",
    "flashdist.integrations.deepspeed_convert",
    "flashdist.integrations.transformers",
    "flashdist.memory",
    "flashdist.numerics.companding",
    "flashdist.numerics.fingerprint",
    "flashdist.numerics.groups",
    "flashdist.numerics.rules",
    "flashdist.numerics.weight_split",
    "flashdist.sharding.replicated",
    "flashdist.sharding.row_shard",
]
# Methods that were published by others: their docstrings name where.
PUBLISHED = {
    *(
        "flashdist.FlashAdam",
        "flashdist.FlashAdamW",
        "flashdist.FlashLion",
        "flashdist.FlashSGD",
        "flashdist.FlashSGDW",
    ),
    *("flashdist.FlashOptimizer.clip_grad_norm_", "flashdist.enable_gradient_release"),
    *("flashdist.numerics.companding.encode_momentum", "flashdist.numerics.companding.encode_variance"),
    *(f"flashdist.numerics.rules.{rule}" for rule in ("adam", "adamw", "lion", "sgd", "sgdw")),
    *("flashdist.numerics.weight_split.split", "flashdist.sharding.replicated.shard_states"),
}
# A tensor is described if its docstring says how it is shaped or what it holds.
DESCRIBES_TENSORS = re.compile(
    r"\bshape|\b0-d\b|\[[^\]]*\]|\bfp32|\bbf16|\bu?int(8|16|32)|\bdtype|\brows\b|\bbits\b|\bnorm\b"
)


def public(module: str) -> Iterator[tuple[str, Any]]:
    """Names and what they stand for: functions, classes, and the public methods and properties of our classes."""
    here = importlib.import_module(module)
    own = [n for n, x in vars(here).items() if getattr(x, "__module__", None) == module and not n.startswith("_")]
    for name in getattr(here, "__all__", own):
        value = getattr(here, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            yield f"{module}.{name}", value
        for attribute, member in vars(value).items() if inspect.isclass(value) else ():
            if not attribute.startswith("_") and (callable(member) or isinstance(member, property)):
                yield f"{module}.{name}.{attribute}", member


BY_MODULE = {module: dict(public(module)) for module in MODULES}


def function_of(member: Any) -> Callable[..., Any] | None:
    """The function behind a name whose arguments a caller gives: a class's constructor, a property's getter."""
    if isinstance(member, property):
        return member.fget
    if inspect.isclass(member):
        member = vars(member).get("__init__") or vars(member).get("__new__")
    return inspect.unwrap(member.__func__ if isinstance(member, staticmethod | classmethod) else member)


def docstring(member: Any) -> str:
    return inspect.cleandoc(member.__doc__ or "")


def arguments(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]


def raised_in(function: Callable[..., Any]) -> set[str]:
    """Names of the exceptions that stand behind ``raise`` in its own body."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {ast.unparse(call.func) for call in calls}


def faults(name: str, member: Any) -> list[str]:
    """What a docstring leaves open."""
    text, function, found = docstring(member), function_of(member), []
    if not text:
        return ["has no docstring"]
    if name.startswith("flashdist.numerics.rules."):
        text += docstring(importlib.import_module("flashdist.numerics.rules"))  # has what all rules take and give
    if name in PUBLISHED and not re.search(r"Source: |, arXiv|ICML", text):
        found.append("does not name its source")
    if function is None or not function.__module__.startswith("flashdist") or is_data(member):
        return found
    signature = inspect.signature(function)
    unannotated = [p.name for p in arguments(function) if p.annotation is inspect.Parameter.empty]
    if unannotated or (not inspect.isclass(member) and signature.return_annotation is inspect.Signature.empty):
        found.append(f"has no type hints for {unannotated or 'what it returns'}")
    if not isinstance(member, property):
        found += [f"raises {e}, and does not say so" for e in sorted(raised_in(function)) if e not in text]
    silent = [p.name for p in arguments(function) if not re.search(rf"(?<!\w){re.escape(p.name)}(?!\w)", text)]
    if silent and (len(arguments(function)) > 1 or "\n" in text):  # one line may speak of one argument without its name
        found.append(f"does not speak of {silent}")
    hints = " ".join(str(p.annotation) for p in arguments(function)) + str(signature.return_annotation)
    if re.search(r"\bTensor\b", hints) and not DESCRIBES_TENSORS.search(text):
        found.append("does not say what its tensors are")
    return found


def is_data(member: Any) -> bool:
    """A dataclass, a tuple of fields or an exception has no constructor of its own to describe."""
    return inspect.isclass(member) and (
        hasattr(member, "__dataclass_fields__") or issubclass(member, tuple | BaseException)
    )


def test_the_names_are_found():
    names = {name for found in BY_MODULE.values() for name in found}
    assert names >= PUBLISHED | {"flashdist.checkpoint.save", "flashdist.memory.MemorySummary.total"}
    assert all(BY_MODULE.values())


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_documented(module):
    found = {name: wrong for name, value in BY_MODULE[module].items() if (wrong := faults(name, value))}
    assert not found, "\n".join(f"{name}: {'; '.join(wrong)}" for name, wrong in found.items())


def test_what_counts_as_a_fault():
    def silent(x: torch.Tensor, y):
        """Adds."""
        if y is None:
            raise ValueError("y is None")
        return x + y

    silent.__module__ = "flashdist.made_up"
    found = faults("flashdist.FlashAdamW", silent)
    for part in ("source", "type hints for ['y']", "ValueError", "speak of ['x', 'y']", "its tensors"):
        assert any(part in fault for fault in found), part
    assert faults("flashdist.made_up.undocumented", lambda x: x) == ["has no docstring"]
