"""The pages say what the result files say."""

from __future__ import annotations

import pytest

from benchmarks import performance


@pytest.mark.parametrize("page", performance.PAGES, ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_those_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert "<!-- speed -->" in text
    assert performance.filled(text) == text, "run python -m benchmarks.performance"


def test_every_table_is_shown():
    text = "".join(page.read_text(encoding="utf-8") for page in performance.PAGES)
    assert all(f"<!-- {name} -->" in text for name in performance.TABLES)


def test_check_finds_a_figure_that_was_changed(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    text = performance.PAGES[1].read_text(encoding="utf-8")
    page.write_text(text.replace("8,374", "9,999"), encoding="utf-8")
    monkeypatch.setattr(performance, "PAGES", (page,))
    assert performance.main(["--check"]) == 1
    assert "page.md is not" in capsys.readouterr().out
    assert performance.main([]) == 0
    assert page.read_text(encoding="utf-8") == text
    assert performance.main(["--check"]) == 0


def test_a_table_that_is_not_known():
    with pytest.raises(KeyError, match="weather"):
        performance.filled("<!-- weather -->\n<!-- end weather -->\n")
