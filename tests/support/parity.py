"""How the Triton backend is compared with the eager one: after one step from the same state, within tabled bounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashdist import FlashLion, FlashOptimizer
from tests.support.backends import BF16, FP16, BackendUnderTest, assert_same_bits, snapshot
from tests.support.tolerances import tolerance


def twins(lab: BackendUnderTest, cls: Any, params: Any, **arguments: Any) -> tuple[FlashOptimizer, FlashOptimizer]:
    """Two optimizers over copies of the same parameters (or groups): eager on the CPU, and that of ``lab``."""
    groups = params if isinstance(params[0], dict) else [{"params": params}]

    def copies(device: torch.device) -> list[dict[str, Any]]:
        return [{**g, "params": [nn.Parameter(p.detach().to(device, copy=True)) for p in g["params"]]} for g in groups]

    eager = cls(copies(torch.device("cpu")), **arguments)
    return eager, lab.build(cls, copies(lab.device), **arguments)


def assert_parity(eager: FlashOptimizer, triton: FlashOptimizer) -> None:
    """Weights and every state tensor agree: bit for bit where the interpreter runs a rule without square roots.

    Otherwise within bounds that hold for one step, and the second optimizer goes on from the first one's state, so that
    they hold at the next comparison too.
    """
    how = "compiled" if any(p.is_cuda for p in _parameters(triton)) else "interpreted"
    theirs, ours = snapshot(eager), snapshot(triton)
    if how == "interpreted" and not any("exp_avg_sq" in state for state in theirs):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a.keys() == b.keys()
            for key in a:
                name = f"{key} of parameter {i} of shape {tuple(b['weight'].shape)}"
                assert_same_bits(_one_nan(a[key]), _one_nan(b[key]), name)
        return
    for i, (p, q) in enumerate(zip(_parameters(eager), _parameters(triton), strict=True)):
        what = f"parameter {i} of shape {tuple(p.shape)}"
        # Fused products round their terms less: what cancels to near 0 differs by an ULP of the terms.
        term = 0.0 if p.grad is None or not p.numel() else float(p.grad.float().abs().nan_to_num(0, 0, 0).max())
        _assert_states_close({k: v.cpu() for k, v in ours[i].items()}, theirs[i], how, what, term)
        lr = max(float(group["lr"]) for group in eager.param_groups)
        found, expected = triton.master_weight(q).cpu(), eager.master_weight(p)
        if how == "compiled" and isinstance(eager, FlashLion):
            found = _same_signs(found, expected, lr)
        _assert_weights_close(found, expected, p, eager.state.get(p), how, what, 4 * lr * term)
    triton.load_state_dict(eager.state_dict())
    with torch.no_grad():
        for p, q in zip(_parameters(eager), _parameters(triton), strict=True):
            q.copy_(p)


def _same_signs(found: Tensor, expected: Tensor, lr: float) -> Tensor:
    """Lion's step is a sign: where its sum cancels to an ULP, fused products turn it. A few elements may, by 2 lr."""
    turned = ((found - expected).abs() - lr).abs() < 1.1 * lr
    turned &= (found - expected).abs() > 0.5 * lr
    assert int(turned.sum()) <= 1 + tolerance("compiled kernel, Lion's signs, share") * found.numel()
    return torch.where(turned, expected, found)


def _one_nan(t: Tensor) -> Tensor:
    """NaN without its sign: x86 makes negative ones, GPUs positive ones, and the kernel keeps what it gets."""
    return torch.where(t.isnan(), torch.nan, t) if t.is_floating_point() else t


def _parameters(opt: FlashOptimizer) -> list[Tensor]:
    return [p for group in opt.param_groups for p in group["params"]]


def _assert_weights_close(
    found: Tensor, expected: Tensor, p: Tensor, state: Any, how: str, what: str, term: float
) -> None:
    error = (state or {}).get("error")
    if error is None:
        grid = {BF16: 2.0**-7, FP16: 2.0**-10}.get(p.dtype, 2.0**-23)
    else:
        # One step of the correction, in units of the weight: what the 16-bit format resolves, by 2^8; 2^16 is fp32.
        grid = 2.0**-23 if error.dtype == torch.int16 else {BF16: 2.0**-15, FP16: 2.0**-18}[p.dtype]
    steps, share = tolerance(f"{how} kernel, weight, grid steps"), tolerance(f"{how} kernel, weight, of the largest")
    _close(found, expected, steps * grid, share, f"master weight of {what}", term)


def _assert_states_close(a: dict[str, Tensor], b: dict[str, Tensor], how: str, what: str, term: float) -> None:
    assert a.keys() == b.keys(), what
    for key, expected in b.items():
        found, name = a[key], f"{key} of {what}"
        assert found.dtype == expected.dtype, name
        assert found.shape == expected.shape, name
        if key in ("weight", "error") or not expected.numel():
            continue  # compared as master weights
        if key == "step":
            assert_same_bits(found, expected, name)
        elif key.endswith("_scale"):
            which = "momentum" if expected.dtype == BF16 else "variance"
            _close(found, expected, tolerance(f"{how} kernel, {which} scale, relative"), 0.0, name)
        elif expected.dtype == torch.float32:
            _close(found, expected, 0.0, tolerance(f"{how} kernel, fp32 moment, of the largest"), name, term)
        else:
            off = int((found.int() - expected.int()).abs().max())
            which = "variance" if expected.dtype == torch.uint8 else "momentum"
            assert off <= tolerance(f"{how} kernel, {which} codes"), f"{name}: off by {off} codes"


def _close(found: Tensor, expected: Tensor, relative: float, share: float, what: str, term: float = 0.0) -> None:
    """Within ``relative`` of each element, or ``share`` of the largest one or of the largest term summed."""
    finite = expected.float()[expected.isfinite()]
    peak = max(float(finite.abs().max()) if finite.numel() else 0.0, term)
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=relative, atol=share * peak, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )
