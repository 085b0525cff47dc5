"""DeepSpeed's ZeRO optimizers, with flat partitions that are the model's own weights.

:func:`take_over` turns a ZeRO optimizer that DeepSpeed has just built into a subclass of itself. What the subclass does
otherwise than DeepSpeed is here: partitions alias the weights, gradients are clipped inside the kernel, fp32 values are
joined from weights and corrections when somebody asks for them, and checkpoints hold codes.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashdist.integrations.deepspeed_checkpoint import PAYLOAD, Master, Moment, Raw, Zeros, payload
from flashdist.integrations.deepspeed_layout import LayoutError, segments_of_shards, segments_of_slice
from flashdist.integrations.deepspeed_state import FlatPartition, FlatStepping, step_partitions
from flashdist.optimizer import FlashOptimizer


class AliasingZero:
    """What stages 1, 2 and 3 share. Comes before DeepSpeed's class in the order of base classes."""

    optimizer: FlatStepping
    loss_scale: float
    clip_grad: float
    MASTER_KEY: str

    def unscale_and_clip_grads(self, _: Any, total_norm: Any) -> None:
        """The factor goes into the kernel instead of over the gradients, which stay as they were reduced."""
        factor = torch.as_tensor(total_norm, dtype=torch.float32).detach()
        factor = torch.where((factor < 0) | ~torch.isfinite(factor), torch.inf, factor)
        scale: Any = self.loss_scale
        if self.clip_grad > 0.0:
            scale = torch.clamp((factor / scale + 1e-6) / self.clip_grad, min=1.0) * scale
        elif scale == 1.0:
            self.optimizer._clip_factor = None
            return
        device = next(iter(self.optimizer.partitions)).device
        self.optimizer._clip_factor = (1.0 / torch.as_tensor(scale, dtype=torch.float32)).to(device)

    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's, with objects in the place of fp32 tensors that are codes on disk and fp32 for who reads them."""
        opt = self.optimizer
        saved: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        payloads = [payload(opt, packed, size) for packed, size in zip(opt.states(), self._lean_sizes(), strict=True)]
        saved[self.MASTER_KEY] = [Master(p) for p in payloads]
        states = (saved.get("base_optimizer_state") or saved["optimizer_state_dict"])["state"]
        for i, saved_partition in enumerate(payloads):
            # DeepSpeed's tools read two moments under Adam's names, whatever the optimizer.
            keys = [*saved_partition["moments"], None, None]
            for name, key in zip(("exp_avg", "exp_avg_sq"), keys, strict=False):
                states[i][name] = Zeros(saved_partition) if key is None else Moment(saved_partition, key)
        saved[PAYLOAD] = Raw(payloads)
        return saved

    def load_state_dict(self, state_dict_list: Any, *args: Any, checkpoint_folder: str | None = None, **_: Any) -> None:
        """Load a universal checkpoint; everything else is loaded by ``engine.load_checkpoint``."""
        if not checkpoint_folder:
            raise RuntimeError("states of this optimizer are loaded by engine.load_checkpoint, which reads codes")
        from flashdist.integrations.deepspeed_load import load_universal

        load_universal(self, checkpoint_folder)

    def _lean_sizes(self) -> list[int]:
        """Elements of each partition that DeepSpeed's tools expect in a checkpoint."""
        raise NotImplementedError

    def _weights_loaded(self) -> None:
        """The partitions have new weights."""

    def _restore_from_bit16_weights(self) -> None:
        """Called when weights were loaded without their states."""
        for partition in self.optimizer.partitions.values():
            partition.drop_corrections()

    def offload_states(self, *_: Any, **__: Any) -> None:
        """Not supported.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("offload_states would part the weights from the optimizer's view of them")


class AliasingZero12(AliasingZero):
    """Stages 1 and 2."""

    MASTER_KEY = "single_partition_of_fp32_groups"
    bit16_groups: list[list[Tensor]]
    single_partition_of_fp32_groups: list[Tensor]
    groups_padding: list[int]

    def _lean_sizes(self) -> list[int]:
        flats = self.single_partition_of_fp32_groups
        return [flat.numel() - padding for flat, padding in zip(flats, self.groups_padding, strict=True)]

    def _link_all_hp_params(self) -> None:
        super()._link_all_hp_params()  # type: ignore[misc]
        for flat, group in zip(self.single_partition_of_fp32_groups, self.bit16_groups, strict=True):
            for p in group:
                # None where no part of the parameter is on this rank.
                link: Any = getattr(p, "_hp_mapping", None)
                if link is not None:
                    link.__class__ = _fragment_class(type(link))
                    link.opt, link.partition = self.optimizer, self.optimizer.partitions[flat]
                p.set_full_hp_param = types.MethodType(_set_full_hp_param, p)  # type: ignore[attr-defined]


class Fragment:
    """DeepSpeed's ``tensor_fragment``, what its ``safe_get_full_*`` functions read of a parameter's part here."""

    opt: FlatStepping
    partition: FlatPartition
    hp_fragment_address: Any
    lp_fragment_address: Any

    def get_hp_fragment(self, optim_state_key: str | None = None) -> Tensor:
        """fp32, joined or decoded now: writing to it has no effect."""
        packed = self.partition.state(self.opt)
        self.partition.drop_stale()
        return packed.read(self.hp_fragment_address.start, self.hp_fragment_address.numel, optim_state_key)

    def get_optim_state_fragment(self, key: str) -> Tensor:
        return self.get_hp_fragment(key)

    def set_optim_state_fragment(self, *_: Any) -> None:
        """There is nothing to link: states are read when asked for."""

    def get_optim_state_keys(self) -> list[str]:
        return list(self.partition.state(self.opt).moments)

    def put(self, values: Tensor, key: str | None) -> None:
        """Set the fp32 master weights, or a moment, of this part from the whole parameter's values."""
        packed = self.partition.state(self.opt)
        if key is not None:
            self.partition.drop_stale()
        part = values.flatten().narrow(0, self.lp_fragment_address.start, self.lp_fragment_address.numel)
        packed.write(self.hp_fragment_address.start, part, key)
        self.partition.trust()


def _fragment_class(kind: type) -> type:
    return kind if issubclass(kind, Fragment) else type(kind.__name__, (Fragment, kind), {"__module__": __name__})


def _set_full_hp_param(self: Any, value: Tensor, optim_state_key: str | None = None) -> None:
    if self._hp_mapping is not None:
        self._hp_mapping.put(value, optim_state_key)


class AliasingZero3(AliasingZero):
    """Stage 3."""

    MASTER_KEY = "fp32_flat_groups"
    fp32_partitioned_groups_flat: list[Tensor]
    dp_process_group: Any
    grad_position: dict[int, tuple[int, int, int]]
    persistent_parameters: list[Any]
    get_param_id: Callable[[Tensor], int]
    check_overflow: Callable[[], None]
    _overflow_clean_up: Callable[[float], None]
    # Set where DeepSpeed does not look for an overflow of bf16 gradients though it was told to.
    look_for_overflow: bool
    overflow: bool

    def _overflow_check_and_loss_scale_update(self, *args: Any, **kwargs: Any) -> bool:
        if not self.look_for_overflow:
            return super()._overflow_check_and_loss_scale_update(*args, **kwargs)  # type: ignore[misc]
        self.check_overflow()
        if self.overflow:
            # The loss scale of bf16 is 1 and stays so: there is nothing else to update.
            self._overflow_clean_up(self.loss_scale)
        return self.overflow

    def _lean_sizes(self) -> list[int]:
        return [flat.numel() for flat in self.fp32_partitioned_groups_flat]

    def _weights_loaded(self) -> None:
        # Small parameters are kept whole on every rank: they are gathered anew once they count as partitioned.
        if self.persistent_parameters:
            self.persistent_parameters[0].partition(self.persistent_parameters)

    def _part(self, param: Any) -> tuple[FlatPartition, int, int]:
        sub_group, start, length = self.grad_position[self.get_param_id(param)]
        return self.optimizer.partitions[self.fp32_partitioned_groups_flat[sub_group]], start, length

    def get_local_fp32_param(self, param: Any, optim_state_key: str | None = None) -> Tensor | None:
        """This rank's share of a parameter's fp32 master weights, or of a moment."""
        if not param.requires_grad:
            return None
        partition, start, length = self._part(param)
        packed = partition.state(self.optimizer)
        partition.drop_stale()
        return packed.read(start, length, optim_state_key)

    def get_full_hp_param(self, param: Any, optim_state_key: str | None = None) -> Tensor | None:
        """A parameter's fp32 master weights, or a moment, gathered from all ranks."""
        share = self.get_local_fp32_param(param, optim_state_key)
        if share is None:
            return None
        ranks = dist.get_world_size(self.dp_process_group)
        whole = torch.empty(ranks * share.numel(), dtype=share.dtype, device=share.device)
        dist.all_gather_into_tensor(whole, share.contiguous(), group=self.dp_process_group)
        return whole[: param.ds_numel].view(param.ds_shape)

    def set_local_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """Set this rank's share of a parameter's fp32 master weights, or of a moment."""
        if not param.requires_grad:
            return
        partition, start, length = self._part(param)
        if value.numel() != length:
            raise ValueError(f"this rank has {length} elements of the parameter, got {value.numel()}")
        packed = partition.state(self.optimizer)
        partition.drop_stale()
        packed.write(start, value.flatten(), optim_state_key)
        partition.trust()

    def set_full_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """Set a parameter's fp32 master weights, or a moment, from its whole value."""
        if value.numel() != param.ds_numel:
            raise ValueError(f"the parameter has {param.ds_numel} elements, got {value.numel()}")
        if not param.requires_grad:
            return
        length = self._part(param)[2]
        ranks, rank = dist.get_world_size(self.dp_process_group), dist.get_rank(self.dp_process_group)
        padded = torch.nn.functional.pad(value.flatten(), (0, ranks * length - value.numel()))
        self.set_local_hp_param(padded[rank * length : (rank + 1) * length], param, optim_state_key)


def take_over(zero: Any, opt: FlashOptimizer, look_for_overflow: bool = False) -> None:
    """Give a ZeRO optimizer that was built with bf16 flat partitions the model's own memory for them.

    Args:
        zero: DeepSpeed's.
        opt: steps the partitions.
        look_for_overflow: at stage 3, look for an overflow before a step, because this DeepSpeed does not.

    Raises:
        LayoutError: where DeepSpeed's buffers are not what they are expected to be; nothing has been changed then.
    """
    stage3 = hasattr(zero, "fp16_partitioned_groups_flat")
    try:
        partitions, storages = _stage3(zero) if stage3 else _stages_1_and_2(zero, opt)
    except (AttributeError, IndexError, KeyError) as error:
        raise LayoutError(f"{type(zero).__name__}: {error}") from error
    for partition, storage in zip(partitions, storages, strict=True):
        # The parameter stays the same object, which DeepSpeed refers to; its clone of the weights is freed.
        partition.flat.data = storage.data
    step_partitions(opt, partitions)
    kind = type(zero)
    ours = AliasingZero3 if stage3 else AliasingZero12
    zero.__class__ = type(kind.__name__, (ours, kind), {"__doc__": kind.__doc__, "__module__": __name__})
    if stage3:
        zero.look_for_overflow = look_for_overflow
    else:
        zero._link_all_hp_params()


Found = tuple[list[FlatPartition], list[Tensor]]


def _stages_1_and_2(zero: Any, opt: FlashOptimizer) -> Found:
    partitions, storages = [], []
    for i, flat in enumerate(zero.single_partition_of_fp32_groups):
        rank = dist.get_rank(zero.real_dp_process_group[i])
        storage = zero.parallel_partitioned_bit16_groups[i][rank]
        whole = zero.bit16_groups_flat[i]
        first = (storage.data_ptr() - whole.data_ptr()) // whole.element_size()
        segments = segments_of_slice(whole, _named(zero, zero.bit16_groups[i]), first, storage.numel())
        partitions.append(FlatPartition(flat, whole, segments, opt.param_groups[i]))
        storages.append(storage)
    return _checked(partitions, storages)


def _stage3(zero: Any) -> Found:
    partitions, storages = [], []
    rank = dist.get_rank(zero.dp_process_group)
    for i, (flat, storage) in enumerate(
        zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True)
    ):
        segments = segments_of_shards(storage, _named(zero, zero.fp16_groups[i]), rank)
        group = zero.optimizer.param_groups[zero.sub_group_to_group_id[i]]
        partitions.append(FlatPartition(flat, storage, segments, group))
        storages.append(storage)
    return _checked(partitions, storages)


def _named(zero: Any, params: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    return [(zero.param_names[p], p) for p in params]


def _checked(partitions: list[FlatPartition], storages: list[Tensor]) -> Found:
    for partition, storage in zip(partitions, storages, strict=True):
        flat = partition.flat
        if (flat.shape, flat.dtype, flat.device) != (storage.shape, storage.dtype, storage.device):
            raise LayoutError(
                f"a flat partition is {flat.dtype} of {tuple(flat.shape)} on {flat.device}, the weights are "
                f"{storage.dtype} of {tuple(storage.shape)} on {storage.device}"
            )
    return partitions, storages
