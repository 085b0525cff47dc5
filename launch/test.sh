#!/usr/bin/env bash
# Checks style and types, then runs the tests that need no GPU. Further arguments go to pytest, for instance
#   bash launch/test.sh -m slow        bash launch/test.sh -m gpu
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up dev
cd "$ROOT"
step() { printf '\n== %s\n' "${*#"$ROOT"/}"; "$@"; }
step "$PYTHON" -m ruff check .
step "$PYTHON" -m ruff format --check .
step "$PYTHON" -m mypy
# One thread: threads of PyTorch that wait for each other spin, and on a busy machine that makes small operations more
# than ten times slower.
export OMP_NUM_THREADS=1
step "$PYTHON" -m pytest -m "not gpu and not slow" "$@"
