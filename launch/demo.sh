#!/usr/bin/env bash
# Trains a small GPT with torch's AdamW and with FlashAdamW and compares memory and loss. For options: --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up demo
exec "$PYTHON" "$ROOT/launch/demo.py" "$@"
