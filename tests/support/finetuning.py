"""A tiny model with a tokenizer and a chat template in a Hugging Face folder, and questions for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer() -> Any:
    """Bytes as tokens, and the marks of ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHATML
    return fast


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A Llama of 80,000 parameters, head tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=256,
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(dtype)


def questions(count: int) -> list[dict[str, Any]]:
    """Sums, as chats."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"{i % 7} + {i % 5}?"},
                {"role": "assistant", "content": f"It is {i % 7 + i % 5}."},
            ]
        }
        for i in range(count)
    ]


def folder(path: Path) -> Path:
    """A Hugging Face folder of both."""
    model(torch.bfloat16).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def gguf_file(path: Path) -> dict[str, torch.Tensor]:
    """A Llama with a tied head, quantized to Q4_1 in a GGUF file; what two of its matrices were."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(path), "llama")
    width, mlp, vocab = 64, 96, 64
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(mlp)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(vocab)
    kind = gguf.GGMLQuantizationType.Q4_1
    drawn = np.random.default_rng(0)
    shapes = {
        "token_embd": (vocab, width), "blk.0.attn_q": (width, width), "blk.0.attn_k": (width // 2, width),
        "blk.0.attn_v": (width // 2, width), "blk.0.attn_output": (width, width), "blk.0.ffn_gate": (mlp, width),
        "blk.0.ffn_up": (mlp, width), "blk.0.ffn_down": (width, mlp),
    }  # fmt: skip
    matrices = {name: drawn.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    for name, matrix in matrices.items():
        writer.add_tensor(f"{name}.weight", gguf.quantize(matrix, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {
        "model.embed_tokens.weight": torch.from_numpy(matrices["token_embd"]),
        "model.layers.0.mlp.up_proj.weight": torch.from_numpy(matrices["blk.0.ffn_up"]),
    }
