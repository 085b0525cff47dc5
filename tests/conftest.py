"""Which backends there are to test here, and which tests this machine can run."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    # Read by Triton when it is imported: without a GPU its kernels run in the interpreter, on CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"
# The tensors here are small. On a busy machine threads that wait for each other made the eager step ten times slower.
torch.set_num_threads(1)

from flashdist.kernels.cpu_native import COMPILERS  # noqa: E402
from tests.support.backends import BackendUnderTest  # noqa: E402

BACKENDS = {
    "eager": BackendUnderTest("eager", torch.device("cpu")),
    "native": BackendUnderTest("native", torch.device("cpu")),
    "triton": BackendUnderTest("triton", torch.device("cuda" if CUDA else "cpu")),
}


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter computes with numpy, which warns where a GPU quietly returns inf or NaN. Both branches of a
    # tl.where are computed, so 0/0 in the one that is not taken is no fault of the kernel.
    for message in ("invalid value encountered", "divide by zero encountered", "overflow encountered"):
        config.addinivalue_line("filterwarnings", f"ignore:{message}:RuntimeWarning:triton.runtime.interpreter")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked gpu where there is none, and tests marked slow unless ``-m`` speaks of them."""
    asked = config.getoption("-m")
    left_out = {name for name, out in (("gpu", not CUDA), ("slow", "slow" not in asked)) if out}
    dropped = [item for item in items if any(item.get_closest_marker(name) for name in left_out)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]


# Continuous integration has a C++ compiler; a machine without one leaves the native backend out.
COMPILER = any(map(shutil.which, COMPILERS))
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C++ compiler")


@pytest.fixture(params=["eager", "triton", pytest.param("native", marks=needs_compiler)])
def backend(request: pytest.FixtureRequest) -> BackendUnderTest:
    """Builds optimizers whose steps run in one backend; tensors belong on ``backend.device``."""
    return BACKENDS[request.param]


@pytest.fixture
def triton_backend() -> BackendUnderTest:
    """The Triton backend alone: compiled where there is a GPU, interpreted elsewhere."""
    return BACKENDS["triton"]


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command line in this process; its exit status, stdout and stderr."""

    from flashdist import cli

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["flashdist", *map(str, arguments)])
        status = 0
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code or 0
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
