#!/usr/bin/env bash
# Trains a small GPT on two ranks, moves it to one, and compares memory and loss with AdamW. For options: --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up demo
exec "$PYTHON" "$ROOT/launch/demo.py" "$@"
