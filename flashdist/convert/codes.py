"""How torch.optim, flashoptim and bitsandbytes keep AdamW's state of one parameter, and its values in fp32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from flashdist.convert.contents import MOMENTS
from flashdist.convert.torch_files import copy_of
from flashdist.numerics.groups import group_layout
from flashdist.numerics.state_format import ERROR, SCALE_SUFFIX, decode_moment
from flashdist.numerics.weight_split import join
from flashdist.sharding.placement import from_bytes

_Shape = tuple[int, ...]
# Elements that are decoded at a time, a multiple of every group's size.
_CHUNK = 1 << 18


class StateOf(ABC):
    """A parameter's state as a library keeps it.

    Attributes:
        step: how many steps it has taken.
        shape: of the parameter, where the state tells; else None.
    """

    step: float
    shape: _Shape | None

    def __init__(self, state: dict[str, Any], what: str) -> None:
        self.state, self.what = self.unwrapped(state), what
        if not self.accepts(state):
            raise ValueError(
                f"{what} has a state with the entries {sorted(map(str, self.state))}: it is of another optimizer, "
                "say which by --from"
            )
        if "step" not in self.state:
            raise ValueError(f"{what} is damaged: the entry step of a parameter's state is missing")
        self.step = float(self.state["step"])
        self.shape = tuple(self.tensor(self.first).shape)

    first = MOMENTS[0]

    @staticmethod
    def unwrapped(state: Any) -> dict[str, Any]:
        """The state without what a library wraps around it."""
        return state if isinstance(state, dict) else {}

    @classmethod
    @abstractmethod
    def recognises(cls, state: Any) -> bool:
        """Whether a state is of this kind and of no other."""

    @classmethod
    def accepts(cls, state: Any) -> bool:
        """Whether a state may be of this kind."""
        return cls.recognises(state)

    @abstractmethod
    def moment(self, place: int) -> Tensor:
        """Momentum (0) or variance (1) in fp32."""

    def master(self, weight: Tensor) -> Tensor:
        """The weight in fp32 with what the state adds to it."""
        return weight.to(torch.float32)

    def check(self, name: str, shape: _Shape, dtype: torch.dtype, bytewidth: Any) -> None:
        """ValueError unless all entries fit the parameter."""
        for key in MOMENTS:
            if tuple(self.tensor(key).shape) != shape:
                raise self.wrong(name, key, shape)

    def wrong(self, name: str, key: str, shape: _Shape) -> ValueError:
        """What to raise for an entry that does not fit."""
        found = self.state.get(key)
        said = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        return ValueError(
            f"{self.what} has {key} of {name} as {said}, which does not fit its weight of shape {shape}: it is "
            "damaged, or of another model (--weights)"
        )

    def tensor(self, key: str) -> Tensor:
        """An entry that must be a tensor."""
        found = self.state.get(key)
        if not isinstance(found, Tensor):
            raise ValueError(f"{self.what} is damaged: the entry {key} of a parameter's state is missing")
        return found


class DenseState(StateOf):
    """torch.optim.AdamW's: dense moments."""

    @classmethod
    def recognises(cls, state: Any) -> bool:
        found = cls.unwrapped(state)
        keys = set(found)
        return (
            set(MOMENTS) <= keys
            and keys <= {"step", *MOMENTS}
            and all(isinstance(found[k], Tensor) and found[k].is_floating_point() for k in MOMENTS)
        )

    def moment(self, place: int) -> Tensor:
        return copy_of(self.tensor(MOMENTS[place])).to(torch.float32)


class FlashState(StateOf):
    """That of ``FlashAdamW.state_dict()``."""

    @classmethod
    def recognises(cls, state: Any) -> bool:
        return set(cls.unwrapped(state)) >= {ERROR, *MOMENTS}

    def check(self, name: str, shape: _Shape, dtype: torch.dtype, bytewidth: Any) -> None:
        super().check(name, shape, dtype, bytewidth)
        self.layout = group_layout(shape)
        for key in MOMENTS:
            scales = self.state.get(key + SCALE_SUFFIX)
            packed = scales is not None and self.layout.grouped and tuple(scales.shape) == self.layout.scale_shape
            if not packed and (scales is not None or not self.tensor(key).is_floating_point()):
                raise self.wrong(name, key + SCALE_SUFFIX, shape)
        error = self.tensor(ERROR)
        self.error = from_bytes(error) if tuple(error.shape) == (*shape, 2) else error
        if tuple(self.error.shape) != shape or self.error.dtype not in (torch.int8, torch.int16):
            raise self.wrong(name, ERROR, shape)

    def moment(self, place: int) -> Tensor:
        values, scales = copy_of(self.tensor(MOMENTS[place])), self.state.get(MOMENTS[place] + SCALE_SUFFIX)
        return values.to(torch.float32) if scales is None else decode_moment(place, values, scales, self.layout)

    def master(self, weight: Tensor) -> Tensor:
        return join(weight, self.error)


class FlashoptimState(StateOf):
    """flashoptim's, of release 0.1.4, with ``compress_state_dict`` or without.

    Compressed, ``<moment>::quantized`` holds a code for each element and ``<moment>::scales`` one fp16 scale for 32 of
    them, counted through the whole tensor. ``error_bits`` counts parts of half a unit in the last place of the weight:
    127ths at 24 bits, 32767ths at 32. Codes and scales may come cast to, or viewed as, the weight's dtype.
    """

    def __init__(self, state: dict[str, Any], what: str) -> None:
        self.first = MOMENTS[0] if MOMENTS[0] in state else f"{MOMENTS[0]}::quantized"
        super().__init__(state, what)
        self.error: Tensor | None = None

    @classmethod
    def recognises(cls, state: Any) -> bool:
        keys = set(cls.unwrapped(state))
        marks = {"error_bits", *(f"{key}::quantized" for key in MOMENTS)}
        return bool(keys & marks) and cls.accepts(state)

    @classmethod
    def accepts(cls, state: Any) -> bool:
        keys = set(cls.unwrapped(state))
        return all(key in keys or f"{key}::quantized" in keys for key in MOMENTS)

    def check(self, name: str, shape: _Shape, dtype: torch.dtype, bytewidth: Any) -> None:
        for key in MOMENTS:
            packed = f"{key}::quantized" in self.state
            stored = f"{key}::quantized" if packed else key
            if tuple(self.tensor(stored).shape) != shape:
                raise self.wrong(name, stored, shape)
            if packed:
                scales = self.tensor(f"{key}::scales")
                if scales.numel() != -(-self.tensor(stored).numel() // 32) or scales.element_size() not in (2, 4):
                    raise self.wrong(name, f"{key}::scales", shape)
        if "error_bits" in self.state:
            self.error = self._error_bits(name, shape, dtype, bytewidth)

    def _error_bits(self, name: str, shape: _Shape, dtype: torch.dtype, bytewidth: Any) -> Tensor:
        bits = self.tensor("error_bits")
        if tuple(bits.shape) != shape or dtype not in (torch.bfloat16, torch.float16):
            raise self.wrong(name, "error_bits", shape)
        if bytewidth not in (3, 4):
            raise ValueError(f"{self.what} does not say how wide master weights are (master_bytewidth): it is damaged")
        if bytewidth == 4 and bits.dtype != torch.int16:
            if bits.element_size() != 2:
                raise self.wrong(name, "error_bits", shape)
            return bits.view(torch.int16)
        return bits

    def moment(self, place: int) -> Tensor:
        key = MOMENTS[place]
        if key in self.state:
            return copy_of(self.tensor(key)).to(torch.float32)
        codes, scales = self.tensor(f"{key}::quantized"), copy_of(self.tensor(f"{key}::scales"))
        if scales.dtype == torch.bfloat16:
            scales = scales.view(torch.float16)
        scales = scales.to(torch.float32).view(-1)
        flat = copy_of(codes).view(-1)
        out = torch.empty(flat.numel(), dtype=torch.float32)
        for begin in range(0, flat.numel(), _CHUNK):
            part = flat[begin : begin + _CHUNK].to(torch.float32)
            scale = scales[begin // 32 : (begin + _CHUNK) // 32].repeat_interleave(32)[: part.numel()]
            if place == 0:
                y = part / 127.0
                out[begin : begin + _CHUNK] = y / (2.0 - y.abs()) * scale
            else:
                out[begin : begin + _CHUNK] = (part / 255.0 * scale).square()
        return out

    def master(self, weight: Tensor) -> Tensor:
        if self.error is None:
            return weight.to(torch.float32)
        steps = 32767.0 if self.error.dtype == torch.int16 else 127.0
        bits, flat = copy_of(self.error).view(-1), weight.reshape(-1)
        out = torch.empty(flat.numel(), dtype=torch.float32)
        for begin in range(0, flat.numel(), _CHUNK):
            w = flat[begin : begin + _CHUNK]
            part = bits[begin : begin + _CHUNK].to(torch.float32) / steps
            # In fp32, as flashoptim adds it: the sum is then its own master weight to the bit.
            out[begin : begin + _CHUNK] = w.to(torch.float32) + (part.to(torch.float64) * _half_ulp(w)).to(
                torch.float32
            )
        return out.view(weight.shape)


def _half_ulp(weight: Tensor) -> Tensor:
    """Half a unit in the last place of bf16 or fp16 values, fp64."""
    mantissa, bias = (7, 127) if weight.dtype == torch.bfloat16 else (10, 15)
    exponent = ((weight.view(torch.int16).to(torch.int32) & 0x7FFF) >> mantissa).clamp(min=1)
    return torch.exp2((exponent - (bias + mantissa + 1)).to(torch.float64))


class BnbState(StateOf):
    """bitsandbytes' AdamW8bit: codes into a table of 256 values, one scale for a block of elements.

    Small tensors have dense states under the same names. Blocks hold as many elements as the scales tell.
    """

    first = "state1"
    _WRAPPED = "__bnb_optimizer_quant_state__"

    @staticmethod
    def unwrapped(state: Any) -> dict[str, Any]:
        found = dict(state) if isinstance(state, dict) else {}
        inner = found.pop(BnbState._WRAPPED, None)
        if isinstance(inner, dict):
            found.update(inner)
        return found

    @classmethod
    def recognises(cls, state: Any) -> bool:
        return {"state1", "state2"} <= set(cls.unwrapped(state))

    def check(self, name: str, shape: _Shape, dtype: torch.dtype, bytewidth: Any) -> None:
        for i in (1, 2):
            codes = self.tensor(f"state{i}")
            if tuple(codes.shape) != shape:
                raise self.wrong(name, f"state{i}", shape)
            if codes.dtype != torch.uint8:
                if not codes.is_floating_point():
                    raise self.wrong(name, f"state{i}", shape)
                continue
            if f"absmax{i}" not in self.state:
                raise ValueError(f"{self.what} keeps one scale a tensor ({name}): only blockwise states are converted")
            if self.tensor(f"qmap{i}").numel() != 256:
                raise self.wrong(name, f"qmap{i}", shape)
            self._block(codes.numel(), self.tensor(f"absmax{i}").numel(), name)

    def _block(self, numel: int, blocks: int, name: str) -> int:
        for size in (256, 2048):
            if -(-numel // size) == blocks:
                return size
        raise ValueError(
            f"{self.what} has {blocks} scales for {numel} elements of {name}: not one for 256 or 2048 of them"
        )

    def moment(self, place: int) -> Tensor:
        i = place + 1
        codes = copy_of(self.tensor(f"state{i}"))
        if codes.dtype != torch.uint8:
            return codes.to(torch.float32)
        table = self.tensor(f"qmap{i}").to(torch.float32)
        scales = copy_of(self.tensor(f"absmax{i}")).to(torch.float32)
        size = self._block(codes.numel(), scales.numel(), "a parameter")
        out = torch.empty(codes.numel(), dtype=torch.float32)
        for begin in range(0, codes.numel(), _CHUNK):
            part = codes.view(-1)[begin : begin + _CHUNK].to(torch.int64)
            scale = scales[begin // size : (begin + _CHUNK) // size + 1].repeat_interleave(size)[: part.numel()]
            out[begin : begin + _CHUNK] = table[part] * scale
        return out
