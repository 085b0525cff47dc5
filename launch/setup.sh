#!/usr/bin/env bash
# Makes the virtual environment that demo.sh and test.sh run in. To be sourced:
#   source launch/setup.sh && set_up demo    # then $PYTHON runs with flashdist and what the demo needs
# An environment that is already good is used as it is, so a second run starts at once.

TORCH_VERSION=2.13.0
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
PYTHON=$VENV/bin/python

say() { printf '[setup] %s\n' "$*"; }
fail() { printf '[setup] error: %s\n' "$*" >&2; return 1; }

# Prints the first interpreter that starts and is of a version torch has builds for.
find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    fail "no Python 3.10 to 3.13 found; install one (Debian, Ubuntu: apt install python3 python3-venv) and run this again"
}

make_venv() {
    local base messages
    base=$(find_python) || return 1
    say "making $VENV with $("$base" -V)"
    if ! messages=$("$base" -m venv --clear "$VENV" 2>&1); then
        # Some distributions ship venv without ensurepip; a half-made folder would only confuse the next run.
        printf '%s\n' "$messages" >&2
        rm -rf "$VENV"
        fail "$base -m venv failed; on Debian and Ubuntu: apt install python3-venv"
    fi
}

# Errors are shown. Python warnings are not: setuptools has one for every editable installation.
pip_install() { PYTHONWARNINGS=ignore "$PYTHON" -m pip install --quiet --disable-pip-version-check "$@"; }

install_torch() {
    if "$PYTHON" -c 'import torch' 2>/dev/null; then
        return 0
    elif nvidia-smi -L 2>/dev/null | grep -q GPU; then
        say "installing torch $TORCH_VERSION with CUDA from PyPI: several GB, this takes minutes"
    elif [ "$(uname -s)" = Linux ]; then
        say "installing torch $TORCH_VERSION for CPUs (about 200 MB)"
        # No retries: where this index cannot be reached the next line should follow within seconds.
        if ! pip_install --no-deps --retries 0 --timeout 15 -i "$TORCH_CPU_INDEX" "torch==$TORCH_VERSION" 2>/dev/null; then
            say "PyTorch's CPU index did not serve it; taking torch from PyPI, whose build is the CUDA one: several GB"
        fi
    else
        say "installing torch $TORCH_VERSION from PyPI (about 100 MB)"
    fi
    # Installs torch where nothing above did, and in every case the packages it depends on.
    pip_install "torch==$TORCH_VERSION"
}

# Changes when the requirements, this script, the interpreter or the place of the repository do.
fingerprint() { { echo "$ROOT"; "$PYTHON" -VV; cat "$ROOT/pyproject.toml" "$ROOT/launch/setup.sh"; } 2>&1 | cksum; }

set_up() { # name of an extra in pyproject.toml: demo or dev
    local extra=$1 stamp current
    current=$(fingerprint)
    for stamp in "$VENV/$extra.stamp" "$VENV/dev.stamp"; do # dev holds all that demo needs
        if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$current" ]; then
            return 0
        fi
    done
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        make_venv || return 1
    fi
    say "upgrading pip"
    pip_install --upgrade pip || return 1
    install_torch || return 1
    say "installing flashdist with its '$extra' extra"
    pip_install --editable "$ROOT[$extra]" || return 1
    fingerprint >"$VENV/$extra.stamp"
    say "ready: $("$PYTHON" -c 'import torch; print("torch", torch.__version__)') in $VENV"
}
