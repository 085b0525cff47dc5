"""The tree of the package: imports point downward, triton stays in its own files, files and functions stay short."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "flashdist").rglob("*.py"))
}

# A module may import what stands in a lower row, and its own row if that is one folder. The longest prefix counts.
LAYERS: list[set[str]] = [
    {"flashdist.version", "flashdist.lazy", "flashdist.lost_updates", "flashdist.modes", "flashdist.plain_numbers"},
    {"flashdist.numerics"},
    {"flashdist.kernels"},
    {"flashdist.sharding"},
    {"flashdist.memory"},
    {"flashdist.precision", "flashdist.roster"},
    {"flashdist.param_state"},
    {"flashdist.state_loading"},
    {"flashdist.optimizer"},
    {"flashdist.algorithms", "flashdist.cpu_step"},
    {
        "flashdist.sharding.gradient_release",
        "flashdist.sharding.release_checks",
        "flashdist.sharding.replicated",
    },
    {"flashdist.checkpoint"},
    {"flashdist.integrations"},
    {"flashdist.convert"},
    {"flashdist"},  # the public names
    {"flashdist.model_shapes"},
    {"flashdist.planner"},
    {"flashdist.plan_tables"},
    {"flashdist.cli"},
    {"flashdist.__main__"},
]
# Beyond the order: sharding and the checkpoint know state tensors, not how they are computed.
NEVER = [
    ("flashdist.sharding", "flashdist.kernels"),
    ("flashdist.checkpoint", "flashdist.kernels"),
    ("flashdist.checkpoint", "flashdist.integrations"),
    ("flashdist.memory", "flashdist.kernels"),
    ("flashdist.precision", "flashdist.kernels"),
]
# What third parties each folder may need. torch and the standard library may be imported anywhere.
OPTIONAL = {
    "triton": ("flashdist.kernels.triton_",),
    "deepspeed": ("flashdist.integrations.",),
    "transformers": ("flashdist.integrations.", "flashdist.checkpoint.", "flashdist.model_shapes"),
    "accelerate": ("flashdist.integrations.",),
    "safetensors": ("flashdist.checkpoint.",),
    "mpi4py": (),
}
MAX_LINES_OF_FILE = 400
MAX_LINES_OF_FUNCTION = 60


def parsed(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def runtime_nodes(tree: ast.AST, at_import: bool) -> Iterator[ast.AST]:
    """All nodes, without what stands under ``if TYPE_CHECKING``: that is never executed.

    With ``at_import`` what is executed when the module is imported: no function bodies.
    """
    for node in ast.iter_child_nodes(tree):
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for other in node.orelse:
                yield other
                yield from runtime_nodes(other, at_import)
            continue
        yield node
        yield from runtime_nodes(node, at_import)


def imports_of(module: str, at_import: bool = False) -> set[str]:
    """Modules that a module imports anywhere in it, functions included; packages of ours down to the submodule."""
    found: set[str] = set()
    for node in runtime_nodes(parsed(module), at_import):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in FILES else node.module)
    return found


def layer(module: str) -> int:
    matches = [
        (len(prefix), i)
        for i, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if module == prefix or (module.startswith(prefix + ".") and prefix != "flashdist")
    ]
    assert matches, f"{module} has no place in the order of the tree: give it one in LAYERS"
    return max(matches)[1]


def ours(modules: set[str]) -> list[str]:
    return sorted(m for m in modules if m.split(".")[0] == "flashdist")


def under(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


@pytest.mark.parametrize("module", FILES)
def test_imports_point_downward(module):
    own = layer(module)
    for other in ours(imports_of(module)):
        same_folder = layer(other) == own and module.split(".")[:2] == other.split(".")[:2]
        assert layer(other) < own or same_folder, f"{module} imports {other}, which stands above it"


@pytest.mark.parametrize("module", FILES)
def test_what_a_folder_must_never_import(module):
    for importer, imported in NEVER:
        if under(module, importer):
            assert not any(under(other, imported) for other in imports_of(module))


def test_no_import_cycles():
    """Also inside a folder, where the order of layers does not tell. A backend is imported when it is chosen."""
    graph = {module: ours(imports_of(module, at_import=True)) for module in FILES}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way, module))
        if module not in done:
            for other in graph.get(module, []):
                visit(other, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("module", FILES)
def test_optional_packages_are_imported_in_their_place_only(module):
    roots = {name.split(".")[0] for name in imports_of(module)}
    for package, places in OPTIONAL.items():
        if package in roots:
            assert any(module.startswith(place) for place in places), f"{module} imports {package}"


def test_numerics_need_torch_alone():
    for module in FILES:
        if under(module, "flashdist.numerics"):
            roots = {name.split(".")[0] for name in imports_of(module)}
            foreign = roots - {"torch", "flashdist", "__future__", "math", "dataclasses", "typing", "collections"}
            assert not foreign, module


@pytest.mark.parametrize("module", FILES)
def test_files_stay_short(module):
    assert len(FILES[module].read_text(encoding="utf-8").splitlines()) < MAX_LINES_OF_FILE


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, without the docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or 0) - first.lineno + 1
    return lines


@pytest.mark.parametrize("module", FILES)
def test_functions_stay_short(module):
    functions = [n for n in ast.walk(parsed(module)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    too_long = {f.name: length(f) for f in functions if length(f) > MAX_LINES_OF_FUNCTION}
    assert not too_long


def test_the_reading_of_imports_itself(tmp_path, monkeypatch):
    """An import in a function counts, one for type checkers does not; a submodule is found behind ``from``."""
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from flashdist.optimizer import FlashOptimizer\n"
        "from flashdist.kernels import tiles\n"
        "def f():\n    import triton.language as tl\n"
    )
    (tmp_path / "m.py").write_text(source)
    monkeypatch.setitem(FILES, "flashdist.numerics.m", tmp_path / "m.py")
    assert imports_of("flashdist.numerics.m") == {"typing", "flashdist.kernels.tiles", "triton.language"}
    with pytest.raises(AssertionError, match="stands above"):
        test_imports_point_downward("flashdist.numerics.m")
    with pytest.raises(AssertionError, match="imports triton"):
        test_optional_packages_are_imported_in_their_place_only("flashdist.numerics.m")


def test_importing_the_package_stays_quick():
    """What takes long to import, or need not be there, is not imported with the package."""
    slow = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp")
    absent = ("triton", "deepspeed", "transformers", "accelerate", "safetensors", "typer", "rich")
    program = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import flashdist\n"
        "flashdist.cast_model(torch.nn.Linear(32, 32))\n"
        f"print(sorted((set(sys.modules) - before) & set({slow + absent!r})))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
