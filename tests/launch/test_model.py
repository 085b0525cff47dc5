from __future__ import annotations

import math

import pytest
import torch
from model import GPT, GPT2_124M, GPTConfig, Linear, init_weights, rotate, rotation, weight_decay_groups

from flashdist import cast_model

TINY = GPTConfig(vocab_size=32, context=12, layers=2, heads=2, width=32)


def tiny(**changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**(vars(TINY) | changes)))  # type: ignore[arg-type]


def tokens(length: int = 12, batch: int = 3) -> torch.Tensor:
    return torch.randint(32, (batch, length), generator=torch.Generator().manual_seed(1))


def test_first_loss_is_that_of_a_uniform_guess():
    model = tiny()
    unrelated = tokens().flip(1)  # the tied head makes a token likely to follow itself
    loss = model.loss(tokens(), unrelated)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(32), rel=0.02)


def test_no_position_sees_a_later_token():
    model = tiny()
    a = tokens()
    b = a.clone()
    b[:, 7:] = (b[:, 7:] + 1) % 32
    difference = (model(a) - model(b)).abs().amax(dim=(0, 2))
    assert difference[:7].max() == 0
    assert difference[7:].min() > 0


def test_gpt2_has_124_million_parameters_with_its_head_tied():
    with torch.device("meta"):
        model = GPT(GPT2_124M)
    # GPT-2 itself has 124.44 M; its biases, which this model leaves out, are 0.1 M of them.
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(124.4e6, rel=1e-3)
    assert not any("head" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("matmul_dtype", [None, torch.float32])
@pytest.mark.parametrize("fp32_residual", [True, False])
def test_bf16_weights_give_fp32_logits_bf16_gradients_and_nearly_the_same_loss(matmul_dtype, fp32_residual):
    exact = tiny().loss(tokens(), tokens())
    model = tiny(matmul_dtype=matmul_dtype, fp32_residual=fp32_residual)
    cast_model(model)
    loss = model.loss(tokens(), tokens())
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == p.dtype == torch.bfloat16 for p in model.parameters())
    assert loss.item() == pytest.approx(exact.item(), rel=0.01)


@pytest.mark.parametrize(("fp32_residual", "expected"), [(True, torch.float32), (False, torch.bfloat16)])
def test_the_stream_between_blocks_has_the_dtype_that_was_asked_for(fp32_residual, expected):
    model = cast_model(tiny(fp32_residual=fp32_residual))
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(tokens())
    assert seen == [expected] * len(model.blocks)


@pytest.mark.parametrize("matmul_dtype", [None, torch.bfloat16, torch.float32])
def test_the_product_runs_in_the_dtype_that_was_asked_for(matmul_dtype):
    layer = Linear(8, 4, matmul_dtype).to(torch.bfloat16)
    assert layer(torch.ones(2, 8)).dtype == (matmul_dtype or torch.bfloat16)


def test_same_seed_gives_the_same_weights_and_another_seed_others():
    first, second = tiny().state_dict(), tiny().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = GPT(TINY).state_dict()
    assert not torch.equal(first["token_embedding.weight"], other["token_embedding.weight"])


def test_only_matrices_decay():
    model = tiny()
    decayed, plain = weight_decay_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert plain["weight_decay"] == 0.0
    names = {id(p): name for name, p in model.named_parameters()}
    assert all("norm" in names[id(p)] for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


def test_a_width_that_the_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="width 30 is not a multiple of heads 4"):
        GPTConfig(vocab_size=32, context=8, layers=1, heads=4, width=30)


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="13 tokens do not fit a context of 12"):
        tiny()(tokens(length=13))


LLAMA = {"kind": "llama", "heads": 4, "kv_heads": 2, "tied_head": False}
KINDS = pytest.mark.parametrize("changes", [{}, LLAMA], ids=["gpt2", "llama"])


@KINDS
def test_losses_of_sequences_are_the_means_over_their_tokens(changes):
    model = tiny(**changes)
    x, y = tokens(), tokens().flip(1)
    losses = model(x, y)
    assert losses.shape == (3,)
    assert losses.dtype == torch.float32
    assert losses.mean().item() == pytest.approx(model.loss(x, y).item(), rel=1e-6)
    assert losses[1].item() == pytest.approx(model.loss(x[1:2], y[1:2]).item(), rel=1e-6)


def test_a_llama_has_no_positions_to_learn_and_the_parameters_of_its_shape():
    with torch.device("meta"):
        model = GPT(
            GPTConfig(
                vocab_size=128256,
                context=2048,
                layers=16,
                heads=32,
                kv_heads=8,
                width=2048,
                mlp_width=8192,
                kind="llama",
            )
        )
    assert sum(p.numel() for p in model.parameters()) == 1_235_814_400  # Llama-3.2-1B
    assert not list(model.buffers())


def test_a_llama_sees_no_later_token_but_the_distance_of_earlier_ones():
    model = tiny(**LLAMA)
    a = tokens()
    b = a.clone()
    b[:, 7:] = (b[:, 7:] + 1) % 32
    difference = (model(a) - model(b)).abs().amax(dim=(0, 2))
    assert difference[:7].max() == 0
    assert difference[7:].min() > 0
    swapped = a[:, [1, 0, *range(2, 12)]]
    assert not torch.allclose(model(a)[:, -1], model(swapped)[:, -1], atol=1e-6)


def test_rotated_products_depend_on_the_distance_alone():
    config = GPTConfig(**(vars(TINY) | LLAMA))  # type: ignore[arg-type]
    rope = rotation(config, 12, torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).expand(2, 1, 1, 12, 8)
    products = (rotate(q, rope) @ rotate(k, rope).transpose(-1, -2))[0, 0]
    for distance in range(12):
        diagonal = products.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)
    assert not torch.allclose(products.diagonal(0), products.diagonal(0)[0] * 0 + products[0, 5], atol=1e-3)


@KINDS
def test_checkpointed_activations_give_the_same_gradients(changes):
    gradients = []
    for checkpointing in (False, True):
        model = cast_model(tiny(**changes, activation_checkpointing=checkpointing))
        model.loss(tokens(), tokens()).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_first_weights_depend_on_the_seed_and_the_names_alone():
    plain, on_meta, other = tiny(), GPT(TINY).to("meta").to_empty(device="cpu"), tiny()
    torch.manual_seed(77)
    init_weights(plain, 3)
    init_weights(on_meta, 3)
    init_weights(other, 4)
    for (name, a), b, c in zip(plain.named_parameters(), on_meta.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == (a.dim() == 1), name
    narrow = plain.blocks[0].mlp.down.weight.std().item()
    wide = plain.blocks[0].mlp.up.weight.std().item()
    assert (narrow, wide) == (pytest.approx(0.01, rel=0.1), pytest.approx(0.02, rel=0.1))
    assert not torch.equal(plain.blocks[0].mlp.up.weight, plain.blocks[1].mlp.up.weight)


def test_heads_that_cannot_share_keys_are_refused():
    with pytest.raises(ValueError, match="heads 4 is not a multiple of kv_heads 3"):
        GPTConfig(vocab_size=32, context=8, layers=1, heads=4, width=32, kv_heads=3)
    with pytest.raises(ValueError, match="is odd, which rotary positions cannot take"):
        GPTConfig(vocab_size=32, context=8, layers=1, heads=2, width=6, kind="llama")
