"""Texts as documents: those that every Python installation carries, or the files of a folder.

The bundled text has two sources: the language reference in `pydoc_data.topics` (English prose, 0.5 MB) and the standard
library's own modules (some 9 MB of Python, varying with its version).
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from config import UserError

# Folders of the standard library that are third-party, machine-made tables or present only in some installations.
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "lib2to3",
    "idlelib",
}


@dataclass(frozen=True)
class Document:
    """A text that is read when it is needed.

    Attributes:
        name: the same on every machine; decides the order and what is held out.
        stamp: changes when the text does (size and time of a file).
        read: gives the text's bytes.
    """

    name: str
    stamp: str
    read: Callable[[], bytes]


def prose() -> dict[str, bytes]:
    """The topics of Python's language reference, by name."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return {f"topic:{name}": text.encode() for name, text in topics.items()}


def sources() -> dict[str, Path]:
    """The standard library's modules, by their path inside it."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return {path.as_posix(): root / path for path in paths if LEFT_OUT.isdisjoint(path.parts)}


def bundled() -> list[Document]:
    """The text that comes with Python, sorted by name."""
    documents = [Document(name, sys.version, partial(bytes, text)) for name, text in prose().items()]
    documents += [_of_file(name, path) for name, path in sources().items()]
    return sorted(documents, key=lambda document: document.name)


def in_folder(folder: Path, pattern: str = "*") -> list[Document]:
    """The files below a folder whose names fit a shell pattern, sorted by name; hidden and empty ones are left out.

    A document's ``read`` raises UserError where a file cannot be read, or has zero bytes and so is no text.

    Raises:
        UserError: no folder, one that cannot be read, or no such file in it.
    """
    if not folder.is_dir():
        raise UserError(f"data.folder {folder} is no folder: give one with text files, or null for the bundled text")
    documents = []
    try:
        for parent, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
            folders[:] = [name for name in folders if not name.startswith(".")]
            _refuse_loops(folder, Path(parent), folders)
            for name in files:
                path = Path(parent, name)
                if not name.startswith(".") and path.match(pattern) and path.is_file() and path.stat().st_size:
                    _refuse_odd_name(path)
                    documents.append(_of_file(path.relative_to(folder).as_posix(), path))
    except OSError as error:
        raise UserError(f"data.folder: {error.filename} cannot be read: {error.strerror}") from error
    if not documents:
        raise UserError(
            f"data.folder {folder} has no text in it (files that fit {pattern!r} and are not empty): put text files "
            "there, or set data.pattern"
        )
    return sorted(documents, key=lambda document: document.name)


def held_out(name: str, share: int) -> bool:
    """Whether a document belongs to the evaluation text: about one in `share`, by its name alone."""
    # A checksum, because Python's own hash of a string differs from run to run.
    return zlib.crc32(name.encode()) % share == 0


def _of_file(name: str, path: Path) -> Document:
    status = path.stat()
    return Document(name, f"{status.st_size} {status.st_mtime_ns}", partial(_read, path))


def _read(path: Path) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"data.folder: {path} cannot be read: {error.strerror}") from error
    if 0 in text:  # pictures, archives, UTF-16: a model would quietly be trained on noise
        raise UserError(
            f"data.folder: {path} has zero bytes, so it is no text in UTF-8: leave it out (data.pattern, such as "
            "'*.txt'), or convert it"
        )
    return text


def _refuse_odd_name(path: Path) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in str(path)):  # how Python holds bytes that are no UTF-8
        raise UserError(f"data.folder: the name {os.fsencode(path)!r} is no UTF-8: rename it")


def _refuse_loops(top: Path, parent: Path, folders: list[str]) -> None:
    """Links to folders are followed, save one to a folder that it is in: that would have no end."""
    above = [parent, *parent.parents]
    above = above[: above.index(top) + 1]
    for name in folders:
        link = parent / name
        if link.is_symlink() and any(link.samefile(one) for one in above):
            raise UserError(f"data.folder: {link} is a link to a folder that it is in: remove it")


def _raise(error: OSError) -> None:
    raise error
