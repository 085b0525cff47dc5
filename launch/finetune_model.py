"""The model to finetune: from a Hugging Face folder, a GGUF file, or drawn; its loss; and its way back to a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from chunked_loss import IGNORE, linear_cross_entropy
from config import UserError
from finetune_config import ModelSection
from finetune_data import Rows
from needed import missing
from safetensors.torch import save_file
from torch import Tensor, nn

from flashdist import FlashOptimizer, cast_model
from flashdist.checkpoint import export_weights

try:
    import transformers
except ModuleNotFoundError as error:
    missing("finetune", error)

# Shapes that `random:NAME` draws weights for, as transformers.LlamaConfig takes them.
SHAPES: dict[str, dict[str, Any]] = {
    "llama3.1-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# What a config may have that changes logits after the head; the loss here computes them itself.
LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "output_multiplier_scale")


def load_model(section: ModelSection, device: torch.device, seed: int) -> Any:
    """The model on its device, in the dtype that it is trained in.

    Raises:
        UserError: a source that cannot be read, or a model whose loss cannot be computed here.
    """
    dtype = DTYPES[section.dtype]
    kind, _, name = section.source.partition(":")
    if kind == "random":
        model = draw(config_of(name), dtype, device, seed)
    else:
        model = read(Path(section.source).expanduser(), dtype).to(device)
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise UserError(f"model.source={section.source}: {type(model).__name__} has no output head, or one with a bias")
    changes = [key for key in LOGIT_CHANGES if getattr(model.config, key, None) not in (None, 1, 1.0)]
    if changes:
        raise UserError(
            f"model.source={section.source}: its config has {changes[0]}, which changes the logits after the head; "
            "this script does not know it"
        )
    model.config.use_cache = False
    if section.activation_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)  # its name from transformers 5 on
        if enable is None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            enable()
    model.train()
    return model


def check_source(section: ModelSection) -> None:
    """Raise UserError where there is no such file or folder."""
    drawn = section.source.startswith("random:")
    if not drawn and not Path(section.source).expanduser().exists():
        raise UserError(f"model.source={section.source}: there is no such file or folder (models are not downloaded)")


def config_of(name: str) -> Any:
    """The config of `random:NAME`: a shape by name, a config.json, or a folder with one."""
    if name in SHAPES:
        return transformers.LlamaConfig(**SHAPES[name], bos_token_id=None, eos_token_id=None)
    path = Path(name).expanduser()
    try:
        return transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"model.source=random:{name}: neither a config.json nor one of {', '.join(SHAPES)} ({_line(error)})"
        ) from error


def draw(config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """A model with random weights, made on its device at once."""
    torch.manual_seed(seed)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def read(path: Path, dtype: torch.dtype) -> Any:
    """A model from a Hugging Face folder or a GGUF file."""
    gguf = path.suffix == ".gguf"
    where: dict[str, Any] = {"gguf_file": path.name} if gguf else {}
    if gguf and hasattr(transformers, "GgufConfig"):  # newer releases leave the weights in blocks otherwise
        where["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent if gguf else path), local_files_only=True, dtype=dtype, **where
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UserError(f"model.source={path} cannot be read: {_line(error)}") from error
    return rebuilt(model, dtype) if gguf else cast_or_keep(model, dtype)


def rebuilt(model: Any, dtype: torch.dtype) -> Any:
    """An ordinary model with the weights of one that was read from a GGUF file, which counts as quantized."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    fresh.load_state_dict(model.state_dict())
    fresh.generation_config = model.generation_config
    return fresh


def cast_or_keep(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """All parameters in one dtype."""
    if dtype == torch.bfloat16:
        return cast_model(model)
    return model.to(dtype)


def load_tokenizer(section: ModelSection) -> Any:
    """The tokenizer beside the model, or the one in `tokenizer`.

    Raises:
        UserError: there is none.
    """
    source = section.tokenizer or Path(section.source.removeprefix("random:")).expanduser()
    gguf = source.suffix == ".gguf"
    where = {"gguf_file": source.name} if gguf else {}
    if not source.exists():
        raise UserError(f"no tokenizer at {source}: give model.tokenizer a folder that has one")
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(source.parent if gguf else source), local_files_only=True, **where
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UserError(f"no tokenizer can be read from {source}: {_line(error)}") from error


def loss_of(model: Any, rows: Rows, kind: str) -> Tensor:
    """Mean cross-entropy of the targets in these rows (on the CPU, where data comes from), on the model's device.

    Only positions with a target go through the head, and their logits never exist as a whole.
    """
    weight = model.get_output_embeddings().weight
    chosen = (rows.targets.flatten() != IGNORE).nonzero().squeeze(1)
    parts = (rows.tokens, rows.positions, chosen, rows.targets.flatten()[chosen])
    tokens, positions, chosen, targets = (t.to(weight.device, non_blocking=True) for t in parts)
    hidden = model.get_decoder()(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
    hidden = hidden.flatten(0, 1)[chosen]
    if kind == "liger":
        return _liger_loss(hidden, weight, targets)
    return linear_cross_entropy(hidden, weight, targets)


def _liger_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        raise UserError("model.loss=liger: pip install liger-kernel, or take model.loss=blocks") from error
    loss: Tensor = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE)(weight, hidden, targets)
    return loss


def export(
    folder: Path,
    model: Any,
    opt: torch.optim.Optimizer | None,
    tokenizer: Any,
    kind: str,
    values: dict[str, Tensor] | None = None,
) -> None:
    """A folder that transformers loads: weights (of FlashAdamW in fp32 the master weights), config, tokenizer.

    Args:
        folder: made where there is none.
        model, tokenizer: as loaded.
        opt: of the model.
        kind: `bf16` or `fp32`.
        values: all weights by name, where the model itself has only parts of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtype = DTYPES[kind]
    if values is None:
        export_weights(folder, model, opt if isinstance(opt, FlashOptimizer) else None, dtype, overwrite=True)
    else:
        buffers = dict(model.named_buffers())
        kept = {name: buffers[name].detach().cpu() for name in model.state_dict() if name in buffers}
        weights = {name: value.to(dtype).contiguous() for name, value in values.items()}
        save_file(weights | kept, folder / "model.safetensors", {"format": "pt"})
    config = json.loads(model.config.to_json_string())
    config |= {"dtype": str(dtype).removeprefix("torch."), "use_cache": True, "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
