"""The opt-in compiled step on a CPU."""

from __future__ import annotations

from flashdist.kernels.cpu_native import NativeBackend
from flashdist.optimizer import FlashOptimizer


def compile_cpu_step(opt: FlashOptimizer) -> None:
    """Let an optimizer step its CPU parameters by a C++ kernel, compiled now for this machine (a few seconds).

    Worth it wherever parameters are trained on a CPU or offloaded to one: one pass over memory instead of about 60, in
    as many threads as ``torch.get_num_threads()`` says. The arithmetic is the default step's, bit for bit, but for the
    root of the variance: here it is rounded correctly, while torch's is off by its last bit at one number in six.
    Parameters on other devices are stepped as before. A copy of the optimizer, or one that was pickled, starts with
    the default step.

    Args:
        opt: one of this library's optimizers; its state stays.

    Raises:
        RuntimeError: there is no C++ compiler, or it failed.
    """
    opt._backends["cpu"] = NativeBackend()
