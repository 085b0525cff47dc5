"""The Python blocks of the documentation run, page by page, each page in one namespace and an empty folder.

Blocks that begin with ```python are whole programs; fragments begin with ```py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Run on several ranks by a test of their own (tests/sharding/test_fsdp2_document.py).
ON_RANKS = {"fsdp2"}
PAGES = [
    page
    for page in sorted((ROOT / "docs").glob("*.md"))
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
