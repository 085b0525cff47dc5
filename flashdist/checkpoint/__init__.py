"""State on its way out of flashdist and back in: checkpoints, and exports to other libraries."""

from flashdist.checkpoint.export import torch_state_dict
from flashdist.checkpoint.importing import import_optimizer
from flashdist.checkpoint.ranks import CheckpointError
from flashdist.checkpoint.save_load import async_save, load, save, verify
from flashdist.checkpoint.saving import AsyncSave
from flashdist.checkpoint.weights import export_weights

__all__ = [
    "AsyncSave",
    "CheckpointError",
    "async_save",
    "export_weights",
    "import_optimizer",
    "load",
    "save",
    "torch_state_dict",
    "verify",
]
