"""FlashOptimizer: param groups, state and step of all five optimizers; what is specific to one is in algorithms.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import Tensor

from flashdist.kernels.backend import Backend, ParamState, StepInputs, make_backend
from flashdist.lazy import outside_graphs
from flashdist.lost_updates import report_lost
from flashdist.memory import MemorySummary, summarize
from flashdist.modes import without_autograd
from flashdist.numerics.fingerprint import drop_stale
from flashdist.numerics.rules import GroupScalars, Rule
from flashdist.param_state import allocate, check_parameter, join_weight, same_state, view
from flashdist.plain_numbers import plain_settings
from flashdist.roster import Release, Roster, local_gradients, with_gradients
from flashdist.sharding.global_norm import global_norm
from flashdist.sharding.gradients import placed_gradient, placed_gradients
from flashdist.sharding.local_shard import is_meta
from flashdist.sharding.overflow import check_found_inf
from flashdist.sharding.partition import AsPlaced, Partition
from flashdist.sharding.placement import as_bytes
from flashdist.sharding.replaced import check_not_replaced
from flashdist.state_loading import FORMAT_VERSION, VERSION_KEY, check_and_convert, copy_state, set_groups


class FlashOptimizer(torch.optim.Optimizer):
    """Base of the five optimizers. Subclasses say what a param group means: :meth:`_rule`, :meth:`_scalars`, checks.

    ``opt.state[p]`` holds plain tensors (DTensors where ``p`` is one): ``step``, ``error`` (the weight's correction)
    and the moments with their ``*_scale``. Its keys, dtypes and bits are those of ``state_dict()``.
    ``params`` and ``defaults`` are torch's, ``check_numerics`` is described in the subclasses.
    """

    # GradScaler hands its scale and its found_inf to step() instead of multiplying the gradients.
    _step_supports_amp_scaling = True

    def __init__(self, params: Any, defaults: dict[str, Any], *, check_numerics: bool = False) -> None:
        self.check_numerics = check_numerics
        self._partition: Partition = AsPlaced()
        self._reset_caches()
        super().__init__(params, {**defaults, VERSION_KEY: FORMAT_VERSION})

    def _reset_caches(self) -> None:
        """What is derived from state and param_groups; never saved."""
        self._backends: dict[str, Backend] = {}
        self._states: dict[Tensor, ParamState] = {}
        self._rosters: dict[Hashable, Roster] = {}
        self._release: Release | None = None
        self._known: list[Tensor] = []
        self._known_groups: list[int] = []
        self._clip_factor: Tensor | None = None

    # What a subclass defines.

    def _rule(self, group: dict[str, Any]) -> Rule:
        """The update rule of a param group."""
        raise NotImplementedError

    def _scalars(self, group: dict[str, Any]) -> GroupScalars:
        """The numbers that the rule reads, from the hyperparameters of a param group."""
        raise NotImplementedError

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for hyperparameters out of range."""
        raise NotImplementedError

    # Param groups.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a ``param_group``, as in torch.optim: its ``params``, and hyperparameters of its own.

        Raises:
            ValueError: a hyperparameter out of range, or a placement that cannot be kept (naming the parameter).
            TypeError: a parameter of a dtype other than bf16, fp16 and fp32, or an FSDP1 flat parameter.
        """
        self._partition.check_new_group()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.update(plain_settings(group))
        try:
            self._check_group(group)
            for p in group["params"]:
                check_parameter(self._name(p), p, group["quantize"])
        except BaseException:
            self.param_groups.pop()
            raise
        group["base_lr"] = float(group["lr"])
        self._know(group, len(self.param_groups) - 1)

    def _know(self, group: dict[str, Any], index: int) -> None:
        self._known = [*self._known, *group["params"]]  # a new list: others hold the old one as what it was
        self._known_groups.extend([index] * len(group["params"]))

    def _name(self, p: Tensor) -> str:
        """How error messages call a parameter: its name where known, else its place and shape."""
        for g, candidate in enumerate(self.param_groups):
            for i, q in enumerate(candidate["params"]):
                if q is p:
                    names = candidate.get("param_names")
                    label = names[i] if names else f"param_groups[{g}]['params'][{i}]"
                    return f"parameter {label} of shape {tuple(p.shape)}"
        return f"a parameter of shape {tuple(p.shape)}"

    def _group_of(self, p: Tensor) -> int:
        for i, group in enumerate(self.param_groups):
            if any(q is p for q in group["params"]):
                return i
        raise ValueError(f"{self._name(p)} is not in any param group of this optimizer")

    def _parameters(self) -> list[Tensor]:
        """All parameters in order; raises where somebody replaced them behind the optimizer."""
        params = [p for group in self.param_groups for p in group["params"]]
        if len(params) != len(self._known) or not all(map(is_, params, self._known)):
            raise RuntimeError(
                "param_groups holds parameters that this optimizer was not built with: it was probably built before "
                "the model was sharded or wrapped. Build the optimizer after fully_shard (or use add_param_group)."
            )
        return self._known

    # State.

    def _state_of(self, p: Tensor, group_index: int) -> ParamState:
        """The kernels' view of a parameter's state, which is allocated at its first use."""
        group = self.param_groups[group_index]
        rule = self._rule(group)
        if not self.state.get(p):
            self.state[p] = allocate(self._name(p), p, group, rule, self._partition)
        new = view(self._name(p), p, self.state[p], group, group_index, rule, self._partition)
        old = self._states.get(p)
        if old is not None and old.weight_dtype != new.weight_dtype:
            raise RuntimeError(
                f"{self._name(p)} was {old.weight_dtype} when its state was made and is {new.weight_dtype} now. "
                "Cast the model before the optimizer's first step."
            )
        if old is not None and same_state(old, new):
            return old
        self._states[p] = new
        return new

    def _allocate_all(self) -> None:
        """State for every trainable parameter, as state_dict() promises."""
        check_not_replaced(self._parameters(), self._name)
        for p, g in zip(self._parameters(), self._known_groups, strict=True):
            if p.requires_grad or p in self.state:
                self._state_of(p, g)

    def _weight(self, p: Tensor) -> Tensor:
        """This rank's part of a weight in logical order."""
        return self._partition.parts([p])[0].detach().contiguous()

    def _drop_stale_corrections(self) -> None:
        """Zero the corrections of weights that were changed behind the optimizer, before anybody sees them."""
        for p, state in self._states.items():
            if state.correction is not None and state.fingerprint is not None and not is_meta(p):
                drop_stale(state.correction, state.fingerprint, self._weight(p), state.layout.row)

    # Step.

    @outside_graphs
    @without_autograd
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient, once.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The closure's value, or None.

        Raises:
            RuntimeError: sparse gradients; parameters that this optimizer was not built with.
            ValueError: a hyperparameter out of range.
            NumericsError: with ``check_numerics=True``, where most updates of a tensor are lost.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._release is None:
            self._step()
        else:
            self._release.end_of_step()
        return loss

    def _step(self) -> None:
        everything = self._parameters()
        self._partition.before_step(everything, self._name)
        params, groups, grads = with_gradients(everything, self._known_groups)
        if len(params) < len(everything):
            check_not_replaced(everything, self._name, first=not params and not self.state)
        lost = self._step_set(None, params, groups, grads, self._clip_factor)
        self._clip_factor = None
        self._partition.after_step(everything, lambda: [self._scalars(group) for group in self.param_groups])
        self._report_lost(lost)

    def _step_set(
        self,
        subset: Hashable,
        params: list[Tensor],
        groups: list[int],
        grads: list[Tensor],
        clip_factor: Tensor | None,
    ) -> list[tuple[Tensor, Tensor]]:
        """Step these and return what was counted as lost. ``subset`` names a set that recurs: its tables are kept."""
        for group in self.param_groups:
            self._check_group(group)
        scalars = [self._scalars(group) for group in self.param_groups]
        # GradScaler sets these two for the time of a step.
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        check_found_inf(found_inf, grads, unscaled=scale is None)
        grads = local_gradients(params, grads, self._local_gradient, self._partition)
        roster = self._rosters.get(subset)
        formats = [(self._rule(g), g["master_weight_bits"], g["quantize"]) for g in self.param_groups]
        if roster is None or not roster.fits(params, formats, self.state):
            roster = Roster(params, groups, formats, self.state, self._state_of, self._partition, self._name)
            self._rosters[subset] = roster
        weights, copies = roster.weights()
        inputs = StepInputs(clip_factor, scale, found_inf, self.check_numerics, subset=subset)
        lost: list[tuple[Tensor, Tensor]] = []
        for device_type in sorted(set(roster.device_types)):
            lost += self._step_on(device_type, roster, weights, grads, scalars, inputs)
        for weight, copy in copies:
            weight.copy_(copy)
        return lost

    def _step_on(
        self,
        device_type: str,
        roster: Roster,
        weights: list[Tensor],
        grads: list[Tensor],
        scalars: list[GroupScalars],
        inputs: StepInputs,
    ) -> list[tuple[Tensor, Tensor]]:
        """Hand everything that lives on one kind of device to its backend; returns what it has counted as lost."""
        params, states, addresses = roster.params, roster.states, roster.addresses
        if len(set(roster.device_types)) > 1:
            on = [i for i, kind in enumerate(roster.device_types) if kind == device_type]
            params, states, addresses = [params[i] for i in on], [states[i] for i in on], [addresses[i] for i in on]
            weights, grads = [weights[i] for i in on], [grads[i] for i in on]
        inputs = replace(inputs, weight_addresses=addresses)
        lost = self._backend(device_type).step(states, weights, grads, scalars, inputs)
        return list(zip(params, lost, strict=True)) if lost is not None else []

    def _local_gradient(self, p: Tensor, grad: Tensor) -> Tensor:
        """A contiguous plain gradient; a copy only where it is expanded, transposed or strided."""
        return self._partition.gradient(p, placed_gradient(p, grad, self._name))

    def _backend(self, device_type: str) -> Backend:
        if device_type not in self._backends:
            self._backends[device_type] = make_backend(device_type)
        return self._backends[device_type]

    def _report_lost(self, lost: Sequence[tuple[Tensor, Tensor]]) -> None:
        if lost:
            params, counts = zip(*lost, strict=True)
            counted = zip(params, self._partition.lost(params, counts), strict=True)
            report_lost(((self._name(p), count, numel) for p, (count, numel) in counted), "elements per tensor")

    @outside_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients (``set_to_none`` as in torch.optim), and drop a clip factor that no step has used."""
        self._clip_factor = None
        if self._release is not None:
            self._release.drop()
        super().zero_grad(set_to_none)

    @outside_graphs
    @without_autograd
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the global gradient norm in the next step.

        The norm is taken over all gradients of this optimizer and over all ranks of sharded ones. The gradients are not
        written: the factor ``min(1, max_norm / (norm + 1e-6))`` is applied inside the next step, and dropped by it or
        by zero_grad. There is no synchronisation with the host.

        Args:
            max_norm: largest norm after clipping.
            norm_type: 2.0, any other positive order, or ``inf``.

        Returns:
            The norm before this clipping, fp32 0-d. Where it is not finite, the factor leaves the gradients non-finite,
            as torch.nn.utils.clip_grad_norm_ does.

        Raises:
            ValueError: ``max_norm`` or ``norm_type`` is no positive number.
            RuntimeError: a sparse gradient; gradient release is enabled.

        Source: Pascanu et al., arXiv 1211.5063, algorithm 1.
        """
        if self._release is not None:
            self._release.refuse_clipping()
        if isinstance(max_norm, str) or not max_norm >= 0:
            raise ValueError(f"max_norm must be a number >= 0, got {max_norm}")
        params, _, grads = with_gradients(self._parameters(), self._known_groups)
        grads = placed_gradients(params, grads, self._name)
        norm = global_norm(grads, norm_type, lambda device_type: self._backend(device_type).grad_square_sum)
        if self._clip_factor is not None:
            norm = norm * self._clip_factor
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self._clip_factor = factor if self._clip_factor is None else self._clip_factor * factor
        return norm

    # What callers look at.

    @without_autograd
    def master_weight(self, p: Tensor) -> Tensor:
        """The fp32 master weight: weight and correction joined.

        Args:
            p: a parameter of this optimizer.

        Returns:
            A new fp32 tensor of p's shape, a DTensor for a DTensor. Where the weights were changed since the last step,
            their corrections count as 0. After ``shard_states`` the whole tensor, and a collective call.
        """
        group_index = self._group_of(p)
        state = self._state_of(p, group_index) if p in self.state else None
        return self._partition.gather(p, join_weight(state, self._weight(p)))

    def memory_summary(self) -> MemorySummary:
        """Bytes by kind on this rank, counted from the live storages."""
        params = [p for group in self.param_groups for p in group["params"]]
        state = [(key, t) for kept in self.state.values() for key, t in kept.items() if isinstance(t, Tensor)]
        derived = [s.fingerprint for s in self._states.values() if s.fingerprint is not None]
        for backend in self._backends.values():
            derived.extend(getattr(backend, "workspace", list)())
        derived.extend(self._partition.workspace())
        return summarize(params, [p.grad for p in params if p.grad is not None], state, derived)

    # Saving and loading.

    @without_autograd
    def state_dict(self) -> dict[str, Any]:
        """As torch's, with state for every trainable parameter, allocated now where no step has been taken.

        Corrections of weights that were changed since the last step are zeroed first. Two-byte corrections are given as
        their bytes, int8 ``[..., 2]``: neither gloo nor NCCL moves int16, so a sharded one could not be gathered.
        """
        self._allocate_all()
        self._drop_stale_corrections()
        packed = super().state_dict()
        groups = [plain_settings(group) for group in packed["param_groups"]]
        states = {key: {k: as_bytes(v) for k, v in state.items()} for key, state in packed["state"].items()}
        return {**packed, "state": states, "param_groups": groups}

    @without_autograd
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of its torch.optim counterpart (moments are encoded then).

        Every tensor is checked before anything is changed, then copied: bits, dtypes and the device of this optimizer's
        parameters are kept. Hyperparameters come from ``state_dict``, as in torch. Corrections are trusted until the
        first step, so the model's weights may be loaded before or after.

        Raises:
            ValueError: other groups or parameters, state of another format version, a shape or dtype that does not fit.
        """
        self._parameters()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        groups, states = check_and_convert(self, state_dict)
        set_groups(self.param_groups, groups)
        self._forget_views()
        for p, loaded_state in states.items():
            if loaded_state is None:
                self.state.pop(p, None)
            else:
                copy_state(self, p, loaded_state)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _forget_views(self) -> None:
        """After state was loaded: formats may be others, corrections are trusted until the first step."""
        self._states.clear()
        self._rosters.clear()
        self._clip_factor = None

    def __getstate__(self) -> dict[str, Any]:
        self._drop_stale_corrections()
        state = super().__getstate__()
        plain = defaultdict(dict, {p: dict(kept) for p, kept in self.state.items()})
        return {"_partition": self._partition, **state, "state": plain, "check_numerics": self.check_numerics}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_caches()
        for index, group in enumerate(self.param_groups):
            self._know(group, index)
