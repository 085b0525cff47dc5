"""The Python blocks of the documentation run, page by page, each page in one namespace and an empty folder.

Blocks that begin with ```python are whole programs; fragments begin with ```py.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Run on several ranks by a test of their own (tests/sharding/test_fsdp2_document.py).
ON_RANKS = {"fsdp2"}
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if page.stem not in ON_RANKS and BLOCK.search(page.read_text(encoding="utf-8"))
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    namespace = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 1
        code = compile("\n" * line + block.group(1), str(page), "exec")
        exec(code, namespace)


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page):
    """As GitHub makes them of headings: lower case, without punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda page: f"{page.parent.name}/{page.stem}",
)
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        assert file.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(file), f"{target} has no heading #{anchor}"


def test_every_page_is_in_the_index():
    index = {target for target, _ in LINK.findall((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))}
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert pages - {"README.md"} <= index


def messages():
    """The texts in the sources of the package, with ``...`` for what is filled in."""
    found = set()
    for path in (ROOT / "flashdist").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(v.value if isinstance(v, ast.Constant) else "..." for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_package():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").split("## Error messages")[1]
    quoted = [m for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for m in re.findall(r"`([^`]+)`", row)]
    known = messages()
    assert len(quoted) > 30
    for message in quoted:
        pattern = ".*".join(map(re.escape, message.split("...")))
        assert any(re.search(pattern, text, re.DOTALL) for text in known), f"no message says: {message}"
