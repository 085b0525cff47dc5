"""DeepSpeed: ``"optimizer": {"type": "FlashAdamW"}`` with ZeRO 0 to 3, and no second copy of the weights.

The one file that changes DeepSpeed. ``import flashdist`` puts the optimizers on ``torch.optim``, where DeepSpeed looks
for names it does not know, and calls :func:`install` as soon as ``deepspeed.runtime.engine`` is loaded. Each change
below acts on engines whose optimizer is one of ours and on nothing else, is made once, and undone by :func:`uninstall`:

1. ``runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS``: our classes are appended.
2. ``DeepSpeedEngine._do_optimizer_sanity_check``: refuses what cannot be right (``deepspeed_refusals.py``), and keeps
   stage 1 with fp32 accumulation on the ZeRO optimizer instead of BF16_Optimizer, which has an fp32 copy.
3. ``DeepSpeedEngine._configure_zero_optimizer``: the ZeRO optimizer is built with bf16 flat partitions. Its clones of
   the weights then become views of the weights, and its class a subclass of itself with the methods of
   ``deepspeed_zero.py``.
4. ``DeepSpeedEngine._configure_fp16_optimizer``: at stage 0, ``deepspeed_stage0.py`` instead of fp32 copies.
5. ``DeepSpeedEngine._load_zero_checkpoint``: our files are read as codes, and for any number of ranks.
6. ``DeepSpeedEngine._get_all_ckpt_names``: stage 3 finds a model file also for a rank that was not there when it was
   saved.
7. ``DeepSpeedEngine._save_checkpoint`` and ``_load_checkpoint``, only in releases before 0.18.5: optimizer states at
   stage 0, which those leave out (``deepspeed_releases.py``).

Where DeepSpeed's internals have changed (another signature, buffers that lie elsewhere), the ZeRO stages fall back to
DeepSpeed's own bf16 clone with a warning that says what that costs (``deepspeed_fallback.py``).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from flashdist.algorithms import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from flashdist.integrations import deepspeed_releases as releases
from flashdist.optimizer import FlashOptimizer

OPTIMIZERS: tuple[type[FlashOptimizer], ...] = (FlashAdamW, FlashAdam, FlashLion, FlashSGD, FlashSGDW)
ENGINE = "deepspeed.runtime.engine"
# The methods that are replaced in every release, with the parameters they must have.
SIGNATURES = {
    "_do_optimizer_sanity_check": ["self", "basic_optimizer"],
    "_configure_zero_optimizer": ["self", "optimizer"],
    "_configure_fp16_optimizer": ["self", "optimizer", "low_precision_dtype"],
    "_load_zero_checkpoint": ["self", "load_dir", "tag", "load_optimizer_states"],
    "_get_all_ckpt_names": ["self", "checkpoints_path", "tag"],
}

Method = Callable[..., Any]


def install() -> None:
    """Let DeepSpeed use our optimizers: their names on ``torch.optim``, and the changes listed above.

    Idempotent. Where DeepSpeed is not loaded yet its part waits until it is.
    """
    for cls in OPTIMIZERS:
        setattr(torch.optim, cls.__name__, cls)
    if _engine_module() is not None:
        _change_deepspeed()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def uninstall() -> None:
    """Undo :func:`install`. Engines that were built meanwhile stay as they are."""
    for cls in OPTIMIZERS:
        if getattr(torch.optim, cls.__name__, None) is cls:
            delattr(torch.optim, cls.__name__)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AfterImport)]
    module = _engine_module()
    if module is None:
        return
    engine = module.DeepSpeedEngine
    for name in _replacements():
        replaced = vars(engine).get(name)
        if hasattr(replaced, "_flashdist_original"):
            setattr(engine, name, replaced._flashdist_original)
    supported = importlib.import_module("deepspeed.runtime.zero.utils").ZERO_SUPPORTED_OPTIMIZERS
    supported[:] = [cls for cls in supported if cls not in OPTIMIZERS]


def _engine_module() -> ModuleType | None:
    """The engine's module if it is loaded (and not just being loaded)."""
    module = sys.modules.get(ENGINE)
    return module if hasattr(module, "DeepSpeedEngine") else None


class _AfterImport(importlib.abc.MetaPathFinder):
    """Installs the changes once the engine's module has been executed, then takes itself out of ``sys.meta_path``."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            install()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _change_deepspeed() -> None:
    module = _engine_module()
    assert module is not None
    supported = importlib.import_module("deepspeed.runtime.zero.utils").ZERO_SUPPORTED_OPTIMIZERS
    if hasattr(module.DeepSpeedEngine, "_do_optimizer_sanity_check"):
        # Without the check that refuses what cannot be right, DeepSpeed's own "untested optimizer" is what users see.
        supported.extend(cls for cls in OPTIMIZERS if cls not in supported)
    for name, replacement in _replacements().items():
        original = vars(module.DeepSpeedEngine).get(name)
        if original is not None and not hasattr(original, "_flashdist_original"):
            changed: Any = replacement(original)
            changed._flashdist_original = original
            setattr(module.DeepSpeedEngine, name, changed)


def _replacements() -> dict[str, Callable[[Method], Method]]:
    replacements: dict[str, Callable[[Method], Method]] = {
        "_do_optimizer_sanity_check": _checked,
        "_configure_zero_optimizer": _without_copy,
        "_configure_fp16_optimizer": _stage0,
        "_load_zero_checkpoint": _reading_codes,
        "_get_all_ckpt_names": _finding_a_model_file,
    }
    if releases.version() < releases.SAVES_STAGE_0:
        replacements |= dict.fromkeys(("_save_checkpoint", "_load_checkpoint"), releases.with_stage_0_states)
    return replacements


def changed_internals(engine_class: type) -> list[str]:
    """Which of the methods above are not what this release of flashdist was written for."""
    found = []
    for name, expected in SIGNATURES.items():
        method = getattr(engine_class, name, None)
        method = getattr(method, "_flashdist_original", method)
        if method is None or list(inspect.signature(method).parameters) != expected:
            found.append(name)
    return found


def _is_ours(engine: Any) -> bool:
    return isinstance(getattr(engine, "basic_optimizer", None), FlashOptimizer)


# Arguments that a later release may add are handed on: for optimizers that are not ours nothing may change.
def _checked(original: Method) -> Method:
    def _do_optimizer_sanity_check(self: Any, basic_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(basic_optimizer, FlashOptimizer):
            return original(self, basic_optimizer, *args, **kwargs)
        from flashdist.integrations.deepspeed_refusals import refuse

        refuse(self, basic_optimizer, releases.MINIMUM)
        wrapper = original(self, basic_optimizer, *args, **kwargs)
        module = sys.modules[ENGINE]
        return module.ZERO_OPTIMIZATION if wrapper == module.BFLOAT16 and self.zero_optimization() else wrapper

    return _do_optimizer_sanity_check


def _without_copy(original: Method) -> Method:
    def _configure_zero_optimizer(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, FlashOptimizer):
            return original(self, optimizer, *args, **kwargs)
        from flashdist.integrations.deepspeed_fallback import use_clones
        from flashdist.integrations.deepspeed_layout import LayoutError
        from flashdist.integrations.deepspeed_zero import take_over

        with _bf16_partitions(self._config.bfloat16_config):
            zero = original(self, optimizer, *args, **kwargs)
        changed, stage = changed_internals(type(self)), int(self.zero_optimization_stage())
        wanted = self._config.bfloat16_config.check_grad_overflow
        try:
            if changed:
                raise LayoutError(f"changed: {', '.join(changed)}")
            take_over(zero, optimizer, releases.must_look_for_overflow(stage, wanted))
        except LayoutError as error:
            warnings.warn(use_clones(optimizer, stage, error), stacklevel=2)
        if early := releases.gathers_too_early(stage, self.device.type, self.dp_world_size):
            warnings.warn(early, stacklevel=2)
        return zero

    return _configure_zero_optimizer


@contextmanager
def _bf16_partitions(config: Any) -> Iterator[None]:
    """DeepSpeed's flags for bf16 flat partitions, for the time in which the ZeRO optimizer is built."""
    before = (config.bf16_master_weights_and_grads, config.bf16_optimizer_states)
    config.bf16_master_weights_and_grads = config.bf16_optimizer_states = True
    try:
        yield
    finally:
        config.bf16_master_weights_and_grads, config.bf16_optimizer_states = before


def _stage0(original: Method) -> Method:
    def _configure_fp16_optimizer(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, FlashOptimizer):
            return original(self, optimizer, *args, **kwargs)
        from flashdist.integrations.deepspeed_stage0 import Stage0Optimizer

        return Stage0Optimizer(
            optimizer, self.gradient_clipping(), self._config.bfloat16_config.check_grad_overflow, self.mpu
        )

    return _configure_fp16_optimizer


def _reading_codes(original: Method) -> Method:
    def _load_zero_checkpoint(self: Any, load_dir: str, tag: str, *args: Any, **kwargs: Any) -> Any:
        from flashdist.integrations.deepspeed_state import FlatStepping

        if not isinstance(self.basic_optimizer, FlatStepping) or self.load_universal_checkpoint():
            return original(self, load_dir, tag, *args, **kwargs)
        from flashdist.integrations.deepspeed_load import load_folder

        return load_folder(self.optimizer, f"{load_dir}/{tag}")

    return _load_zero_checkpoint


def _finding_a_model_file(original: Method) -> Method:
    def _get_all_ckpt_names(self: Any, checkpoints_path: str, tag: str, *args: Any, **kwargs: Any) -> Any:
        found = original(self, checkpoints_path, tag, *args, **kwargs)
        if found or not _is_ours(self) or not self.zero_optimization_partition_weights():
            return found
        # Stage 3 saves a file a rank; what is read from it is alike in all of them.
        return [self._get_ckpt_name(checkpoints_path, tag, mp_placeholder="00", pp_placeholder="0")]

    return _get_all_ckpt_names
