"""The names under which a model's tensors are kept: the same whatever wraps the model.

``blocks.0.weight`` is called so in the bare module, under DDP, FSDP2, torch.compile and activation checkpointing. A
tensor that the model holds in several places (tied weights) is kept once, under its first name; the others are aliases.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

# What torch's wrappers put between a module and the one it wraps.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class ModelTensors:
    """Parameters and persistent buffers of a model by name.

    Attributes:
        by_name: each tensor once, in the model's order.
        aliases: further names of tensors, to their first.
        parameters: the names of parameters among ``by_name``, by parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        self.by_name: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.parameters: dict[Tensor, str] = {}
        first: dict[Tensor, str] = {}
        for name, tensor, is_parameter in _walk(model, ""):
            if tensor in first:
                self.aliases[name] = first[tensor]
                continue
            if name in self.by_name:
                raise ValueError(
                    f"two tensors of the model are called {name} once the names of wrappers {_WRAPPERS} are left out: "
                    "rename one of the modules"
                )
            first[tensor] = name
            self.by_name[name] = tensor
            if is_parameter:
                self.parameters[tensor] = name

    def name_of(self, p: Tensor) -> str:
        """A parameter's name; ValueError where the model does not have it."""
        name = self.parameters.get(p)
        if name is None:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(p.shape)} that the model does not have: it was built "
                "with another model, or before the model was sharded. Give the model whose parameters it steps."
            )
        return name


def reshard(model: nn.Module) -> None:
    """Have FSDP2's modules hold their shards: after an evaluation without a backward some still hold whole weights."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor, bool]]:
    _refuse_extra_state(module, prefix)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter, True
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer, False
    wraps = ("module", *_WRAPPERS) if isinstance(module, DistributedDataParallel) else _WRAPPERS
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, prefix if name in wraps else f"{prefix}{name}.")


def _refuse_extra_state(module: nn.Module, prefix: str) -> None:
    if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
        raise ValueError(
            f"the module {prefix.removesuffix('.') or 'model'} ({type(module).__name__}) keeps extra state of its own "
            "(get_extra_state), which a checkpoint does not hold: give it to save() by `extra`"
        )
