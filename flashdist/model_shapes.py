"""The shapes of a model's weights, from a name, a Hugging Face configuration or a number of parameters."""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ModelShape:
    """What the memory of training a decoder depends on.

    Attributes:
        name: how to call it.
        shapes: of every weight, tied ones once.
        layers, width, kv_width, mlp_width, vocabulary: of the decoder; 0 where only a number of parameters is known.
        layer_parameters: weights in one layer.
    """

    name: str
    shapes: Shapes
    layers: int = 0
    width: int = 0
    kv_width: int = 0
    mlp_width: int = 0
    vocabulary: int = 0
    layer_parameters: int = 0

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(map(math.prod, self.shapes))

    @property
    def largest(self) -> int:
        """Elements of the largest weight."""
        return max(map(math.prod, self.shapes))


_LLAMA = {"model_type": "llama", "tie_word_embeddings": False}
KNOWN: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_positions": 1024, "vocab_size": 50257},
    "smollm2-135m": {
        **_LLAMA, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "llama-3.1-70b": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip
# Decoders whose weights are Llama's, with biases on queries, keys and values where that is said.
_LLAMA_LIKE = {"llama": False, "mistral": False, "qwen2": True}


def model_shape(spec: str) -> ModelShape:
    """The shape of a model.

    Args:
        spec: a known name (``llama-3.1-8b``), ``params=7e9``, a ``config.json``, or the folder of one.

    Raises:
        ValueError: an unknown name (the nearest is suggested) or configuration.
        FileNotFoundError: a folder without ``config.json``.
    """
    number = re.fullmatch(r"params=([0-9.]+(?:[eE][+]?[0-9]+)?)([kKmMbB]?)", spec)
    if number:
        count = float(number.group(1)) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[number.group(2).lower()]
        rows = max(1, round(count / 4096))
        return ModelShape(f"{count:,.0f} parameters", ((rows, 4096),))
    if spec.lower() in KNOWN:
        return from_config(KNOWN[spec.lower()], spec.lower())
    path = Path(spec)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{spec} has no config.json: give a Hugging Face model's folder")
    if not path.is_file():
        near = difflib.get_close_matches(spec.lower(), KNOWN, 1)
        hint = f" Did you mean {near[0]}?" if near else f" Known: {', '.join(KNOWN)}."
        raise ValueError(f"no model {spec!r}: give a known name, a config.json, its folder, or params=7e9.{hint}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    return from_config(config, path.parent.name or str(path))


def from_config(config: dict[str, Any], name: str) -> ModelShape:
    """The shape that a Hugging Face configuration describes; through transformers for what is not known here."""
    kind = config.get("model_type")
    try:
        if kind == "gpt2":
            return _gpt2(config, name)
        if kind in _LLAMA_LIKE:
            return _llama(config, name, _LLAMA_LIKE[kind])
    except KeyError as error:
        raise ValueError(f"the configuration of {name} lacks {error}") from error
    return _through_transformers(config, name)


def _llama(config: dict[str, Any], name: str, attention_bias: bool) -> ModelShape:
    width, mlp, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
    head = config.get("head_dim") or width // heads
    q, kv = heads * head, (config.get("num_key_value_heads") or heads) * head
    layer: list[tuple[int, ...]] = [(q, width), (kv, width), (kv, width), (width, q)]
    layer += [(mlp, width), (mlp, width), (width, mlp), (width,), (width,)]
    if config.get("attention_bias", attention_bias):
        layer += [(q,), (kv,), (kv,)]
    ends: list[tuple[int, ...]] = [(vocabulary, width), (width,)]
    if not config.get("tie_word_embeddings", _ties(config)):
        ends.append((vocabulary, width))
    return _decoder(name, layer, ends, layers, width, kv, mlp, vocabulary)


def _ties(config: dict[str, Any]) -> bool:
    """Whether embedding and head are tied where a configuration does not say: transformers' own default."""
    return config.get("model_type") == "gpt2"


def _gpt2(config: dict[str, Any], name: str) -> ModelShape:
    width, layers = config["n_embd"], config["n_layer"]
    mlp = config.get("n_inner") or 4 * width
    layer = [(width, 3 * width), (3 * width,), (width, width), (width,), (width, mlp), (mlp,), (mlp, width), (width,)]
    layer += [(width,)] * 4
    ends = [(config["vocab_size"], width), (config["n_positions"], width), (width,), (width,)]
    return _decoder(name, layer, ends, layers, width, width, mlp, config["vocab_size"])


def _decoder(
    name: str,
    layer: list[tuple[int, ...]],
    ends: list[tuple[int, ...]],
    layers: int,
    width: int,
    kv: int,
    mlp: int,
    vocabulary: int,
) -> ModelShape:
    shapes = tuple(layer) * layers + tuple(ends)
    return ModelShape(name, shapes, layers, width, kv, mlp, vocabulary, sum(map(math.prod, layer)))


def _through_transformers(config: dict[str, Any], name: str) -> ModelShape:
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(
            f"the configuration of {name} is of model_type {config.get('model_type')!r}, which is read through "
            "transformers: pip install 'flashdist[hf]', or give params=7e9"
        ) from error
    try:
        kind = dict(config)
        described = AutoConfig.for_model(kind.pop("model_type"), **kind)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(described)
    except Exception as error:  # transformers raises many kinds for configurations that it does not know
        raise ValueError(f"transformers cannot build the model that {name} describes: {error}") from error
    shapes = tuple(tuple(p.shape) for p in model.parameters())

    def number(*names: str) -> int:
        return next((int(v) for v in (getattr(described, n, None) for n in names) if isinstance(v, int)), 0)

    width, layers = number("hidden_size", "n_embd"), number("num_hidden_layers", "n_layer")
    vocabulary = number("vocab_size")
    mlp = number("intermediate_size", "n_inner") or 4 * width
    inner = sum(map(math.prod, shapes)) - vocabulary * width
    return ModelShape(name, shapes, layers, width, width, mlp, vocabulary, inner // max(layers, 1))
