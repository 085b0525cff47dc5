"""Questions and answers from Python's own documentation, as chat records for launch/finetune.py.

    python launch/python_questions.py questions.jsonl

A question asks what a function, method or class of the standard library does, with its signature; the answer is the
first paragraph of its documentation. Every Python installation carries the text; what is in it varies with its version.
"""

from __future__ import annotations

import ast
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from data import sources

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Answers of other lengths say too little, or are lists.
SHORTEST, LONGEST = 40, 600


def questions() -> list[dict[str, list[dict[str, str]]]]:
    """All records, in an order that depends on their text alone; no two have the same answer."""
    seen: set[str] = set()
    records = []
    for path, file in sorted(sources().items()):
        for question, answer in _of_module(path, file.read_bytes()):
            if answer not in seen:
                seen.add(answer)
                chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                records.append({"messages": chat})
    return sorted(records, key=lambda r: zlib.crc32(r["messages"][1]["content"].encode()))


def _of_module(path: str, text: bytes) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # templates and examples of wrong code
        return
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for name, node in _definitions(tree, module):
        documentation = ast.get_docstring(node)
        answer = " ".join((documentation or "").split("\n\n")[0].split())
        if SHORTEST <= len(answer) <= LONGEST:
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            signature = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
            yield f"What does the {kind} {name}{signature} of Python's standard library do?", answer


def _definitions(tree: ast.AST, place: str) -> Iterator[tuple[str, Definition]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield f"{place}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, f"{place}.{node.name}")


def main() -> int:
    """Writes the file named on the command line."""
    if len(sys.argv) != 2:
        print("usage: python launch/python_questions.py FILE.jsonl", file=sys.stderr)
        return 2
    records = questions()
    Path(sys.argv[1]).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    print(f"{len(records)} questions in {sys.argv[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
