from __future__ import annotations

import os

import pytest
from config import UserError
from data import bundled, held_out, in_folder, prose, sources


def test_the_bundled_text_is_large_and_mostly_printable():
    documents = bundled()
    text = b"".join(document.read() for document in documents)
    assert len(text) > 4_000_000
    printable = sum(text.count(bytes([c])) for c in (10, *range(32, 127)))
    assert printable > 0.98 * len(text)
    names = [document.name for document in documents]
    assert names == sorted(set(names))


def test_both_sources_are_there_and_no_third_party_package():
    assert len(prose()) > 50
    names = sources()
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not any("site-packages" in name for name in names)


def test_a_folder_is_searched_in_a_fixed_order_without_hidden_and_empty_files(tmp_path):
    for name in ("b.txt", "a/c.txt", "a.md", ".hidden.txt", ".git/d.txt", "a/empty.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"" if "empty" in name else name.encode())
    assert [(d.name, d.read()) for d in in_folder(tmp_path, "*.txt")] == [
        ("a/c.txt", b"a/c.txt"),
        ("b.txt", b"b.txt"),
    ]
    assert len(in_folder(tmp_path)) == 3


def test_a_stamp_changes_with_the_file(tmp_path):
    path = tmp_path / "a"
    path.write_text("one")
    before = in_folder(tmp_path)[0].stamp
    assert in_folder(tmp_path)[0].stamp == before
    path.write_text("other")
    assert in_folder(tmp_path)[0].stamp != before


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"data.folder .* is no folder"):
        in_folder(tmp_path / "none")
    with pytest.raises(UserError, match="has no text in it"):
        in_folder(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"files that fit '\*.txt'"):
        in_folder(tmp_path, "*.txt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder_is_named(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o000)
    with pytest.raises(UserError, match="closed cannot be read: Permission denied"):
        in_folder(tmp_path)


def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "a").write_text("text")
    document = in_folder(tmp_path)[0]
    (tmp_path / "a").unlink()
    with pytest.raises(UserError, match="a cannot be read: No such file"):
        document.read()


def test_about_the_asked_share_is_held_out():
    out = [held_out(f"document {i}", 10) for i in range(1000)]
    assert 70 <= sum(out) <= 130


@pytest.mark.parametrize("content", [bytes(range(256)), "a text".encode("utf-16")], ids=["bytes", "UTF-16"])
def test_a_file_that_is_no_text_is_named(tmp_path, content):
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "b.bin").write_bytes(content)
    text, other = in_folder(tmp_path)
    assert text.read() == b"a text"
    with pytest.raises(UserError, match=r"b\.bin has zero bytes.*data\.pattern"):
        other.read()
