"""Casting a model to the 16-bit dtype that its optimizer trains in.

**Norms with running statistics** (BatchNorm*, SyncBatchNorm, InstanceNorm with track_running_stats) stay fp32 wholly:
a running mean in bf16 stops moving. PyTorch computes them on 16-bit inputs natively, so they need no hooks.

**Buffers are not cast.** An optimizer has no correction byte for a buffer, so rounding one is final, and it does harm
without any error: rotary `inv_freq` loses the positions, moving averages and router biases freeze. The price: an fp32
buffer that is added to activations (a sinusoidal table, an additive mask, FrozenBatchNorm, the vectors of
spectral_norm) gives an fp32 result, which the next 16-bit layer refuses with a dtype error. Then either name the
module that owns it in `keep_fp32`, or cast that buffer: `module.table = module.table.to(dtype)`.

**Kept modules** run in fp32 inside the 16-bit model: their 16-bit inputs are cast to fp32 before forward and their
fp32 outputs to the model's dtype after it, by hooks that deepcopy and pickle with the model. Tensors inside tuples,
lists, dicts and registered pytrees are reached, those in other objects are not. The outputs of a kept head are thus
16-bit as well. A parameter kept alone (`"*.bias"`) gets no hook: its module's forward must take mixed dtypes.

**FSDP2**: cast before `fully_shard`, or at the latest before the first forward. One FSDP group takes parameters of one
dtype only, so give kept modules and norms a `fully_shard` of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from flashdist.memory import storage_key
from flashdist.sharding.local_shard import local

Keep = str | nn.Module | type[nn.Module]

_HALF = (torch.bfloat16, torch.float16)
_FP16_OVERFLOW = 65520.0  # the smallest magnitude that rounds to inf in fp16
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# Modules that are never called: their children are, so a hook belongs there.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def cast_model(model: nn.Module, dtype: torch.dtype = torch.bfloat16, *, keep_fp32: Iterable[Keep] = ()) -> nn.Module:
    """Casts the fp32, bf16 and fp16 parameters of a model to `dtype`, in place.

    After the call every such parameter, of any shape, has `dtype`, except the kept ones, which are fp32. Buffers are
    left alone, and so are integer and complex parameters; norms with running statistics are always kept (the module's
    docstring says why). The Parameter objects stay the same (an optimizer built before still holds them) with their
    requires_grad, hooks, parametrizations, memory format, ties and DTensor placements. Nothing is changed if the call
    raises. Calling it again with other arguments replaces what the first call set up.

    Args:
        model: any module; parameters may be on meta or DTensors.
        dtype: torch.bfloat16 or torch.float16.
        keep_fp32: what stays (or becomes) fp32, parameters and buffers: shell patterns over the full names of modules,
            parameters and buffers (`"lm_head"`, `"*.norm*"`; case matters, `*` crosses dots, a module's name covers
            all below it), module instances, module classes.

    Returns:
        `model`. Two Parameter objects that were the same view of one storage are one Parameter object afterwards.

    Raises:
        TypeError: `keep_fp32` is a single entry instead of a collection, or has an entry of another type.
        ValueError: `dtype` is another one; an entry of `keep_fp32` matches nothing, or they cover all parameters; a
            parameter is fp64 or fp8, lazy, an FSDP1 flat parameter, beyond the range of fp16, or has a gradient in its
            old dtype; tied parameters of which only one is kept, or which overlap without being the same view.
        RuntimeError: an FSDP2 model has run already.
    """
    if dtype not in _HALF:
        raise ValueError(f"cast_model: dtype must be torch.bfloat16 or torch.float16, got {dtype}")
    chosen = _chosen(model, keep_fp32)
    native = {name for name, module in model.named_modules(remove_duplicate=False) if _has_running_stats(module)}
    kept = chosen | native
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if parameters and all(_covers(chosen, name) for name in parameters):
        raise ValueError("cast_model: keep_fp32 covers every parameter of the model, so nothing would be cast")

    _check_fsdp(model)
    floating = {name: p for name, p in parameters.items() if p.is_floating_point()}
    targets = {name: torch.float32 if _covers(kept, name) else dtype for name in floating}
    for name, parameter in floating.items():
        _check_parameter(name, parameter, targets[name])
    aliases = _ties(floating, targets)

    _cast_parameters(model, floating, targets, aliases)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if buffer.dtype in _HALF and _covers(kept, name):
            _set_data(buffer, buffer.data.float())
    _install_hooks(model, chosen, dtype)
    return model


class _InputsToFp32:
    """Forward pre-hook of a kept module. A class, so that the module can be pickled and copied."""

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tree_map_only(Tensor, self._cast, args), tree_map_only(Tensor, self._cast, kwargs)

    @staticmethod
    def _cast(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in _HALF else tensor


class _OutputsTo:
    """Forward hook of a kept module: fp32 outputs become the model's dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(Tensor, self._cast, output)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.dtype == torch.float32 else tensor


def _has_running_stats(module: nn.Module) -> bool:
    # A BatchNorm without running statistics is no exception: its weights are as few, and it runs as natively.
    return isinstance(module, _BATCH_NORMS) or (isinstance(module, _INSTANCE_NORMS) and module.track_running_stats)


def _chosen(model: nn.Module, keep_fp32: Iterable[Keep]) -> set[str]:
    """The full names of the modules, parameters and buffers that the entries of `keep_fp32` match."""
    if isinstance(keep_fp32, str | nn.Module | type):
        raise TypeError(f"cast_model: keep_fp32 takes a collection such as [{_label(keep_fp32)}], not a single entry")
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tensors += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    chosen: set[str] = set()
    for entry in keep_fp32:
        if isinstance(entry, str):
            matched = {name for name in [*modules, *tensors] if fnmatchcase(name, entry)}
        elif isinstance(entry, nn.Module):
            matched = {name for name, module in modules.items() if module is entry}
        elif isinstance(entry, type) and issubclass(entry, nn.Module):
            matched = {name for name, module in modules.items() if isinstance(module, entry)}
        else:
            raise TypeError(f"cast_model: keep_fp32 takes name patterns, modules and module classes, got {entry!r}")
        if not matched:
            raise ValueError(f"cast_model: keep_fp32 entry {_label(entry)} matches nothing in the model")
        chosen |= matched
    # A module that is registered under several names is kept under all of them.
    shared = {modules[name] for name in chosen if name in modules}
    return chosen | {name for name, module in modules.items() if module in shared}


def _label(entry: object) -> str:
    if isinstance(entry, type):
        return entry.__name__
    return repr(entry) if isinstance(entry, str) else f"<{type(entry).__name__} instance>"


def _covers(kept: set[str], name: str) -> bool:
    """Whether `name` or a module above it is in `kept`."""
    parts = name.split(".")
    return "" in kept or any(".".join(parts[: end + 1]) in kept for end in range(len(parts)))


def _check_fsdp(model: nn.Module) -> None:
    for name, module in model.named_modules():
        get_state = getattr(module, "_get_fsdp_state", None)
        # FSDP2 keeps its own view of each shard from its first forward on, and would go on gathering the old weights.
        # An unknown state counts as one that has run.
        if get_state is not None and getattr(get_state(), "_is_root", True) is not None:
            raise RuntimeError(
                f"cast_model: the FSDP2 module {name!r} has run already and would keep its old weights; "
                "cast the model before fully_shard, or at the latest before the first forward"
            )


def _check_parameter(name: str, parameter: nn.Parameter, target: torch.dtype) -> None:
    if is_lazy(parameter):
        raise ValueError(f"cast_model: parameter {name!r} is not initialised yet; run one forward first")
    if getattr(parameter, "_is_flat_param", False):
        raise ValueError(f"cast_model: parameter {name!r} is an FSDP1 flat parameter; use FSDP2 (fully_shard)")
    if parameter.dtype not in (torch.float32, *_HALF):
        raise ValueError(f"cast_model: parameter {name!r} is {parameter.dtype}; convert it to torch.float32 first")
    if parameter.dtype == target:
        return
    if parameter.grad is not None:
        raise ValueError(
            f"cast_model: parameter {name!r} has a gradient in {parameter.grad.dtype} and is to become {target}; "
            "call zero_grad() first"
        )
    shard = local(parameter).detach()
    if target == torch.float16 and shard.numel() and not shard.is_meta:
        low, high = (bound.item() for bound in torch.aminmax(shard))
        if max(-low, high) >= _FP16_OVERFLOW:
            raise ValueError(f"cast_model: parameter {name!r} reaches {max(-low, high):g}, beyond fp16; use bfloat16")


def _ties(floating: dict[str, nn.Parameter], targets: dict[str, torch.dtype]) -> dict[str, str]:
    """Finds parameters that share memory, and refuses those that would no longer do so after the cast.

    Returns:
        The names of Parameter objects that are the same view as an earlier object's, each with that object's name.
    """
    aliases: dict[str, str] = {}
    for first, second in _overlapping(floating):
        a, b = floating[first], floating[second]
        if targets[first] != targets[second]:
            fp32, other = (first, second) if targets[first] == torch.float32 else (second, first)
            raise ValueError(
                f"cast_model: {fp32!r} and {other!r} are tied, but only {fp32!r} is kept in fp32; keep both or neither"
            )
        if _same_view(local(a), local(b)):
            if a is not b and second not in aliases:
                _check_mergeable(first, a, second, b)
                aliases[second] = first
        elif a.dtype != targets[first] or b.dtype != targets[second]:
            raise ValueError(
                f"cast_model: {first!r} and {second!r} are different views of the same memory, which a cast would "
                "separate; make them one Parameter first"
            )
    return aliases


def _overlapping(floating: dict[str, nn.Parameter]) -> Iterator[tuple[str, str]]:
    """Pairs of names whose byte ranges in one storage meet, each in the model's order, the earliest names first.

    Column slices of one matrix count as overlapping: their ranges do, though they share no element.
    """
    storages: dict[int, list[tuple[int, int, int]]] = {}
    names = list(floating)
    for order, parameter in enumerate(floating.values()):
        view = local(parameter)
        if view.numel():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
            start = int(view.storage_offset())
            span = (start * view.element_size(), (start + extent) * view.element_size(), order)
            storages.setdefault(storage_key(view), []).append(span)
    for spans in storages.values():
        spans.sort()
        for position, (_, end, order) in enumerate(spans):
            # Thousands of slices of one flat buffer are usual: look ahead only as far as this one reaches.
            for follower in range(position + 1, len(spans)):
                start, _, other = spans[follower]
                if start >= end:
                    break
                yield names[min(order, other)], names[max(order, other)]


def _check_mergeable(first: str, a: nn.Parameter, second: str, b: nn.Parameter) -> None:
    if a.requires_grad != b.requires_grad:
        raise ValueError(f"cast_model: {first!r} and {second!r} share one storage but differ in requires_grad")
    if b._backward_hooks or b._post_accumulate_grad_hooks:
        raise ValueError(
            f"cast_model: {second!r} becomes the Parameter object of {first!r}, whose storage it shares, and would "
            "lose its hooks; register them after the cast"
        )


def _same_view(a: Tensor, b: Tensor) -> bool:
    return (a.storage_offset(), a.shape, a.stride(), a.dtype) == (b.storage_offset(), b.shape, b.stride(), b.dtype)


def _cast_parameters(
    model: nn.Module,
    floating: dict[str, nn.Parameter],
    targets: dict[str, torch.dtype],
    aliases: dict[str, str],
) -> None:
    for name, parameter in floating.items():
        if name not in aliases and parameter.dtype != targets[name]:
            _set_data(parameter, parameter.data.to(targets[name]))
    for name, first in aliases.items():
        # The replaced object shows the shared weight too: an optimizer that was built with it holds no dead memory.
        _set_data(floating[name], floating[first].data)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, floating[first])
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants the weights of a layer in one buffer; they have new ones now


def _set_data(target: Tensor, value: Tensor) -> None:
    """`target.data = value` that also holds for wrapper subclasses.

    The assignment carries over what PyTorch itself knows of a DTensor (dtype, device), not the local shard and the
    specification, which the wrapper keeps in slots and attributes. `torch.utils.swap_tensors` would exchange those too,
    but takes the hooks along and refuses a tensor to which a weak reference exists.
    """
    target.data = value
    if is_traceable_wrapper_subclass(value):
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                setattr(target, slot, getattr(value, slot))
        target.__dict__.update(value.__dict__)


def _install_hooks(model: nn.Module, chosen: set[str], dtype: torch.dtype) -> None:
    """Removes the hooks of an earlier cast and puts new ones on the outermost kept modules."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _InputsToFp32 | _OutputsTo)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    for module in dict.fromkeys(_outermost(model, "", chosen)):
        module.register_forward_pre_hook(_InputsToFp32(), with_kwargs=True)
        module.register_forward_hook(_OutputsTo(dtype))


def _outermost(parent: nn.Module, prefix: str, chosen: set[str]) -> Iterator[nn.Module]:
    """The kept modules below `parent` that are not inside another one and are called with 16-bit inputs."""
    for leaf, child in parent.named_children():
        name = f"{prefix}{leaf}"
        own = [f"{name}.{key}" for key, p in child.named_parameters(recurse=False) if p.is_floating_point()]
        below = [f"{name}.{key}" for key, p in child.named_parameters() if p.is_floating_point()]
        # A module all of whose parameters are chosen one by one ("lm_head.weight") is kept as well.
        kept = _covers(chosen, name) or (bool(own) and all(_covers(chosen, key) for key in below))
        if not kept or isinstance(child, _CONTAINERS):
            yield from _outermost(child, f"{name}.", chosen)
        elif not _has_running_stats(child):
            yield child
