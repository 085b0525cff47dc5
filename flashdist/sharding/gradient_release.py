"""Gradient release: step each parameter as soon as its gradient is complete, and free the gradient.

All gradients of a model are never alive together, which saves 2 of the 7.19 bytes per parameter of FlashAdamW. Weights,
moments and corrections come out as they would without, bit for bit: a parameter's gradient is complete only when all
its uses have run their backward (a tied weight's after the last one), and nothing reads the parameter after that. Where
something would (a second graph that saved it), autograd raises, because the step counts as a change in place.

Each launch costs the host some 0.1 ms and the GPU a pause, so gradients wait for each other: until they have about a
64th of the model's elements together, those of vectors mostly for the end of backward.
Under FSDP2 the same hooks run after the reduce-scatter, on the shard.

Source: Lv et al., arXiv 2306.09782 (LOMO), section 3.1; the hook is torch's own, after "optimizer in backward".
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from flashdist.optimizer import FlashOptimizer
from flashdist.sharding.clip_guard import guard_clipping, unguard_clipping
from flashdist.sharding.local_shard import local
from flashdist.sharding.placement import place_like
from flashdist.sharding.previous_norm import PreviousNorm
from flashdist.sharding.release_checks import check_arguments, check_model, released_names

# Gradients are stepped together from this share of the model on, within these bounds (64 and 256 MiB in bf16).
BATCH_SHARE = 1 / 64
MIN_BATCH_ELEMENTS, MAX_BATCH_ELEMENTS = 1 << 25, 1 << 27

PreStep = Callable[[Tensor, Tensor], "bool | float | Tensor | None"]
# Where gradients appear: a device, and on GPUs the stream on which they are computed; and whether of vectors. These
# wait apart: they run through another kernel, so that each batch of matrices with a vector in it would be two launches.
Place = tuple[torch.device, "torch.cuda.Stream | None", bool]


@dataclass
class _Batch:
    """Parameters whose gradients are complete, to be stepped together."""

    indices: list[int] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    elements: int = 0


class GradientRelease:
    """What :func:`enable_gradient_release` returns: a handle with :meth:`remove`, and a context manager."""

    def __init__(
        self, opt: FlashOptimizer, names: list[str], pre_step: PreStep | None, max_norm: float | None, batch: int | None
    ) -> None:
        self._opt = opt
        self._params = list(opt._parameters())
        self._groups = list(opt._known_groups)
        self._names = names
        self._pre_step = pre_step
        self._norm = None if max_norm is None else PreviousNorm(self._params, max_norm)
        elements = sum(local(p).numel() for p in self._params)
        self._batch_elements = batch or min(max(int(elements * BATCH_SHARE), MIN_BATCH_ELEMENTS), MAX_BATCH_ELEMENTS)
        # Each device of a model has a thread of its own in backward.
        self._lock = threading.RLock()
        self._pending: dict[Place, _Batch] = {}
        self._batches_done: dict[Place, int] = {}
        self._seen: set[int] = set()
        self._in_backward = self._measuring = False
        me = weakref.ref(self)
        self._hooks = [_add_hook(p, me, i) for i, p in enumerate(self._params)]
        guard_clipping(self)
        opt._release = self

    @property
    def active(self) -> bool:
        """Whether parameters are stepped during backward."""
        return self._opt._release is self

    @property
    def last_norm(self) -> Tensor | None:
        """With ``clip="previous_norm"``: the global gradient norm of the last step (before clipping), fp32 0-d.

        A resumed run sets it, so that its first step is clipped as it would have been.
        """
        return None if self._norm is None else self._norm.value

    @last_norm.setter
    def last_norm(self, value: Tensor) -> None:
        if self._norm is None:
            raise RuntimeError('last_norm belongs to clip="previous_norm", which this release does not have')
        self._norm.set(value)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """With ``clip="previous_norm"``: a backward in here steps nothing; it measures :attr:`last_norm`, and frees the
        gradients.

        Nothing is known before the first step, so it is not clipped, and a large gradient stays in the variance long
        after. Measured on its own batch, it is clipped exactly as torch's clip_grad_norm_ would:

            with handle.measure():
                loss_of(first_batch).backward()

        ``pre_step`` is called as in a step. On several ranks the end is a collective call, so all of them measure.

        Raises:
            RuntimeError: without clipping; where gradients wait for ``opt.step()``; ``opt.step()`` in here; at the end,
                where no backward finished.
        """
        if self._norm is None:
            raise RuntimeError('measure() belongs to clip="previous_norm", which this release does not have')
        if self._seen or self._measuring or not self.active:
            raise RuntimeError("measure() begins before a backward, not between a backward and its opt.step()")
        self._measuring = True
        try:
            yield
            if not self._seen or self._in_backward:
                raise RuntimeError("no backward finished inside measure(), so there is no norm")
            self._norm.finish()
        finally:
            self._measuring = False
            self._norm.forget()
            self._forget()

    def owns(self, p: Tensor) -> bool:
        """Whether this parameter is stepped during backward."""
        return self.active and any(q is p for q in self._params)

    def remove(self) -> None:
        """Back to ordinary gradients and steps; what a backward that did not finish has left is dropped."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._forget()
        unguard_clipping(self)
        if self.active:
            self._opt._release = None

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    # During backward.

    def _complete(self, index: int) -> None:
        """The gradient of a parameter is complete: step it now, or with the next batch."""
        with self._lock, torch.no_grad():
            p = self._params[index]
            grad, p.grad = p.grad, None
            if grad is None:
                return
            if grad.requires_grad:
                raise RuntimeError(
                    "gradient release cannot step inside backward(create_graph=True): remove() it for this backward"
                )
            if index in self._seen:
                raise RuntimeError(
                    f"parameter {self._names[index]} got a second gradient before opt.step(). With gradient release a "
                    "parameter is stepped as soon as its gradient is complete, so gradients cannot be accumulated over "
                    "several backward passes (the first one is in the moments already): call opt.step() after each "
                    "backward. After a backward that raised, call opt.zero_grad() first."
                )
            self._begin()
            self._seen.add(index)
            if self._pre_step is not None and not _verdict(self._pre_step(p, grad), grad, self._names[index]):
                return
            place = _place(grad)
            if place[2]:
                grad = self._alone(p, grad)
            batch = self._pending.setdefault(place, _Batch())
            batch.indices.append(index)
            batch.grads.append(grad)
            batch.elements += local(grad).numel()
            if batch.elements >= self._batch_elements:
                self._step(place)

    def _alone(self, p: Tensor, grad: Tensor) -> Tensor:
        """A vector's gradient that keeps no more memory than its own alive while it waits: FSDP2's are views of all
        gradients of a layer."""
        part = self._opt._local_gradient(p, grad)
        shares = part.untyped_storage().nbytes() > 2 * part.numel() * part.element_size()
        return place_like(p, part.clone(), p.shape) if shares else grad

    def _begin(self) -> None:
        """At the first gradient of a backward."""
        if not self._in_backward:
            self._opt._parameters()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
            self._in_backward = True

    def _step(self, place: Place) -> None:
        """Step a batch. The n-th batch of a backward mostly holds the same parameters in every step."""
        batch = self._pending.pop(place)
        number = self._batches_done[place] = self._batches_done.get(place, 0) + 1
        params = [self._params[i] for i in batch.indices]
        factor = None
        if self._norm is not None:
            self._norm.add(params, batch.grads, lambda device_type: self._opt._backend(device_type).grad_square_sum)
            factor = self._norm.factor
        if self._measuring:
            return
        groups = [self._groups[i] for i in batch.indices]
        self._opt._step_set((*place, number), params, groups, batch.grads, factor)
        # Kernels write behind autograd's back: without this, another graph that saved a weight would use the new one.
        increment_version(params)

    @torch.no_grad()
    def _end_of_backward(self) -> None:
        with self._lock:
            for place in list(self._pending):
                with _on(place):
                    self._step(place)
            for device, stream, _ in self._batches_done:
                if stream is not None:
                    torch.cuda.current_stream(device).wait_stream(stream)
            self._in_backward = False

    # Calls of the optimizer's methods.

    def end_of_step(self) -> None:
        """``opt.step()``: everything has been stepped; the next backward may begin.

        Raises:
            RuntimeError: GradScaler; a backward that raised; gradients that appeared beside the release.
        """
        if getattr(self._opt, "grad_scale", None) is not None or getattr(self._opt, "found_inf", None) is not None:
            raise RuntimeError(
                "gradient release cannot be used with GradScaler: parameters are stepped before it has unscaled the "
                "gradients. Train in bf16, which needs no scaler, or remove() the release."
            )
        if self._measuring:
            raise RuntimeError("opt.step() inside measure(): nothing has been stepped there; leave it first")
        if self._in_backward:
            raise RuntimeError(
                f"the last backward did not finish: {len(self._seen)} of {len(self._params)} parameters had their "
                "gradients, and most of these were stepped. Call opt.zero_grad() to drop the rest and go on."
            )
        for i, p in enumerate(self._opt._parameters()):
            if p.grad is not None:
                known = self._names[i] if i < len(self._names) else "that was added after enable_gradient_release"
                raise RuntimeError(
                    f"parameter {known} has a gradient although gradient release frees it: DistributedDataParallel "
                    "puts gradients back after backward (use FSDP2's fully_shard), as may code that sets .grad"
                )
        if self._norm is not None:
            self._norm.finish()
        self._forget()

    def drop(self) -> None:
        """``opt.zero_grad()``: nothing to do, or what a backward that raised has left is dropped.

        Raises:
            RuntimeError: after a finished backward without step(), because its gradients are applied already.
        """
        if self._measuring:
            return
        if self._seen and not self._in_backward:
            raise RuntimeError(
                "zero_grad() cannot drop the gradients of the last backward: gradient release has applied them. Call "
                "opt.step() after each backward; to skip steps, give enable_gradient_release a pre_step."
            )
        if self._norm is not None:
            self._norm.forget()
        self._forget()

    def refuse_clipping(self) -> None:
        """``opt.clip_grad_norm_()`` and torch's."""
        raise RuntimeError(
            "gradients cannot be clipped to a global norm with gradient release: parameters are stepped before it is "
            'known. Use enable_gradient_release(..., clip="previous_norm", max_norm=...), which takes the factor from '
            "the last step's norm, or clip each gradient in pre_step."
        )

    def _forget(self) -> None:
        self._pending.clear()
        self._batches_done.clear()
        self._seen.clear()
        self._in_backward = False


def enable_gradient_release(
    model: nn.Module,
    opt: FlashOptimizer,
    pre_step: PreStep | None = None,
    clip: str | None = None,
    *,
    max_norm: float | None = None,
    batch_elements: int | None = None,
) -> GradientRelease:
    """Step each parameter during backward, as soon as its gradient is complete, and free the gradient.

    ``opt.step()`` must still be called after each backward: it marks the end of a step (learning rate schedulers and
    closures work as always) and catches what cannot be right. Weights and state are those of an ordinary step.

        with enable_gradient_release(model, opt):       # or handle = ...; handle.remove()
            for batch in data:
                model(batch).loss.backward()
                opt.step()

    Args:
        model: on one device or several, or sharded by FSDP2 (``fully_shard``); its parameters are those of ``opt``.
            Activation checkpointing, tied weights and torch.compile are fine.
        opt: one of this library's optimizers.
        pre_step: called as ``pre_step(parameter, gradient)`` for each complete gradient (under FSDP2 with the reduced
            DTensors, in the same order on all ranks), which it may change in place. ``False`` vetoes: the parameter and
            its state stay as they are. A number or a 0-d tensor is multiplied into the gradient. None and True: go on.
        clip: ``"previous_norm"`` multiplies the gradients by ``min(1, max_norm / (norm + 1e-6))``, with the global norm
            (over ranks) of the gradients of the step before. No synchronisation. The first step is not clipped, except
            where :meth:`GradientRelease.measure` has measured it.
        max_norm: for ``clip``.
        batch_elements: gradients wait until they have this many elements together (per rank). By default a 64th of
            the model, at least 2^25 (64 MiB in bf16) and at most 2^27. Vectors wait apart.

    Returns:
        A handle with ``remove()``, ``active``, ``last_norm`` and ``measure()``; as a context manager it removes itself
        at the end.

    Raises:
        TypeError: an optimizer of another library; FSDP1; DeepSpeed.
        ValueError: DistributedDataParallel; parameters outside ``model``, or unsharded beside sharded ones; CPU offload
            of FSDP2; ``clip`` without ``max_norm``.
        RuntimeError: release is enabled already; a parameter has a gradient. Later: gradients accumulated over several
            backward passes, GradScaler, ``clip_grad_norm_`` (the optimizer's and torch's), ``create_graph=True``.

    Source: Lv et al., arXiv 2306.09782 (LOMO), section 3.1.
    """
    check_arguments(opt, clip, max_norm, batch_elements)
    check_model(model)
    return GradientRelease(opt, released_names(model, opt), pre_step, max_norm, batch_elements)


def _add_hook(p: Tensor, release: weakref.ref[GradientRelease], index: int) -> Any:
    def gradient_complete(_: Tensor) -> None:
        alive = release()
        if alive is not None:
            alive._complete(index)

    frozen = not p.requires_grad
    if frozen:  # may be thawed later; a hook can only be put on a tensor that takes gradients
        p.requires_grad_(True)
    handle = p.register_post_accumulate_grad_hook(gradient_complete)
    if frozen:
        p.requires_grad_(False)
    return handle


def _verdict(answer: Any, grad: Tensor, name: str) -> bool:
    """Whether to step, from what pre_step returned; a factor is multiplied in."""
    if answer is None or isinstance(answer, bool):
        return answer is not False
    number = isinstance(answer, int | float)
    if not number and not (isinstance(answer, Tensor) and answer.numel() == 1 and answer.is_floating_point()):
        raise TypeError(f"pre_step must return None, True, False, a number or a 0-d tensor; got {answer!r} for {name}")
    grad.mul_(answer)
    return True


def _place(grad: Tensor) -> Place:
    shard = local(grad)
    vector = grad.dim() < 2
    if shard.device.type != "cuda":
        return shard.device, None, vector
    stream = torch.cuda.current_stream(shard.device)
    # FSDP2 may have allocated it on another stream, whose next user must wait for the step.
    shard.record_stream(stream)
    return shard.device, stream, vector


def _on(place: Place) -> AbstractContextManager[Any]:
    return nullcontext() if place[1] is None else torch.cuda.stream(place[1])
