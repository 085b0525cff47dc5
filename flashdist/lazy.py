"""Parts of torch that take half a second each to import, used without importing them."""

from __future__ import annotations

import sys

from torch._compile import _disable_dynamo

# torch.compiler.disable, which imports torch._dynamo at the first call instead of at the decoration. torch's own
# optimizers are decorated with it.
outside_graphs = _disable_dynamo


def loaded_class(module: str, name: str) -> type | None:
    """A class of a module that somebody has imported; None where nobody has: then it has no objects either."""
    return getattr(sys.modules.get(module), name, None)
