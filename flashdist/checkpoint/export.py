"""The way back to torch.optim: dense fp32 moments under the names that torch's own optimizers use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashdist.numerics.state_format import SCALE_SUFFIX, STEP, decode_moment
from flashdist.optimizer import FlashOptimizer
from flashdist.sharding.local_shard import local
from flashdist.state_loading import TORCH_HYPERPARAMETERS


@torch.no_grad()
def torch_state_dict(opt: FlashOptimizer) -> dict[str, Any]:
    """The optimizer's state as its torch.optim counterpart's ``load_state_dict`` takes it.

    Moments are decoded to fp32 of the parameter's shape (DTensors stay sharded); corrections are left out: load the
    fp32 values of ``opt.master_weight(p)`` into the model to keep them.

    Args:
        opt: FlashAdamW for torch.optim.AdamW, FlashAdam for Adam, FlashSGD for SGD.

    Returns:
        ``{"state": ..., "param_groups": ...}`` with new tensors.
    """
    packed = opt.state_dict()
    params = [p for group in opt.param_groups for p in group["params"]]
    indices = [i for group in packed["param_groups"] for i in group["params"]]
    by_index = dict(zip(indices, params, strict=True))
    groups = [
        {k: v for k, v in group.items() if k in TORCH_HYPERPARAMETERS or k in ("params", "param_names")}
        for group in packed["param_groups"]
    ]
    return {"state": {i: _dense(opt, by_index[i], s) for i, s in packed["state"].items()}, "param_groups": groups}


def _dense(opt: FlashOptimizer, p: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    layout = opt._partition.layout(p)
    dense = {STEP: state[STEP].clone()}
    names = [key for key in state if key + SCALE_SUFFIX in state or key in ("exp_avg", "exp_avg_sq", "momentum_buffer")]
    for place, name in enumerate(names):
        if name + SCALE_SUFFIX in state:
            moment = decode_moment(place, local(state[name]), local(state[name + SCALE_SUFFIX]), layout)
        else:
            moment = local(state[name]).clone()
        dense[name] = opt._partition.wrap(p, moment.contiguous(), p.shape)
    return dense
