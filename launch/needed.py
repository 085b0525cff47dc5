"""What the scripts need beyond PyTorch and flashdist: where it is missing, one line says how to install it."""

from __future__ import annotations

import sys
from typing import NoReturn

EXIT_CODE = 2


def missing(extra: str, error: ModuleNotFoundError) -> NoReturn:
    """End the program: a module that is listed under ``extra`` in pyproject.toml could not be imported."""
    print(f"error: {error.name} cannot be imported: pip install -e '.[{extra}]'", file=sys.stderr)
    sys.exit(EXIT_CODE)
