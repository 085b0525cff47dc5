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
