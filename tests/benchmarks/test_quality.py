"""The quality experiments: a start and its branches, the schemes laid beside each other, and result files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.quality import pretrain, results
from benchmarks.quality.arms import ARMS, Start, flashdist_adamw, torch_adamw
from benchmarks.quality.corpus import Corpus, checksum
from benchmarks.quality.schemes import SCHEMES, dynamic_map
from benchmarks.quality.start import Config, Data, Models, make_start
from flashdist import FlashAdamW
from flashdist.numerics import companding

TINY = {
    "layers": 1, "heads": 2, "width": 64, "context": 16, "vocab_size": 64, "matmul_dtype": "float32", "batch": 2,
    "lr": 1e-3, "warmup": 2, "start_steps": 4, "branch_steps": 3, "max_norm": 1.0, "start_beta2": 0.95,
    "eval_sequences": 4, "track": 0,
    "plan": [
        {"arms": ["adamw", "adamw_again", "flashadamw"], "beta2": [0.95, 0.999], "seeds": [0]},
        {"arms": ["bf16_master", "bf16", "states_flashdist", "lion", "flashlion", "flashoptim"], "beta2": [0.95],
         "seeds": [0]},
    ],
}  # fmt: skip


@pytest.fixture
def corpus() -> Corpus:
    tokens = np.random.default_rng(0).integers(0, 64, 3000).astype(np.uint16)
    return Corpus(tokens[:2000], tokens[2000:], checksum(tokens[:2000], tokens[2000:]))


def started(corpus: Corpus) -> tuple[Config, Data, Models, Start]:
    config = Config(**TINY)  # type: ignore[arg-type]
    data, models = Data(corpus, config, "cpu"), Models(config, "cpu", compiled=False)
    start, _ = make_start(config, models, data)
    return config, data, models, start


def test_runs_are_made_in_order_written_and_not_repeated(corpus, tmp_path, monkeypatch):
    config, data, models, start = started(corpus)
    out = tmp_path / "result.json"
    result = {**results.head("pretrain"), "runs": [], "failed": [], "numerics": []}
    pretrain.run_all(config, start, models, data, result, out, end=float("inf"))
    written = results.read(out)
    # flashoptim needs a GPU: it fails and the others go on.
    assert [(r["arm"], r["beta2"]) for r in written["runs"]] == [run[:2] for run in config.runs()][:-1]
    assert [f["arm"] for f in written["failed"]] == ["flashoptim"]
    assert all(np.isfinite(r["final_val_loss"]) and len(r["curve"]) == 3 for r in written["runs"])
    assert [entry["beta2"] for entry in written["numerics"]] == [0.95, 0.999]

    monkeypatch.setattr(pretrain, "branch", lambda *args: pytest.fail("a run was made twice"))
    monkeypatch.setitem(ARMS, "flashoptim", ARMS["adamw"])
    written["runs"].append({**written["runs"][0], "arm": "flashoptim", "beta2": 0.95, "seed": 0})
    pretrain.run_all(config, start, models, data, written, out, end=float("inf"))


def test_no_run_is_begun_that_would_not_end_in_time(corpus, tmp_path):
    config, data, models, start = started(corpus)
    result: results.Result = {"experiment": "pretrain", "runs": [], "failed": [], "numerics": []}
    pretrain.run_all(config, start, models, data, result, tmp_path / "out.json", end=0.0)
    assert result["runs"] == []


def test_an_arm_starts_where_the_start_ended(corpus):
    """FlashAdamW joined from weight and correction has the start's weights to 24 bits, and its moments to a code."""
    _, _, models, start = started(corpus)
    model = models.get(torch.bfloat16)
    step = flashdist_adamw(model, start, 0.999)
    optimizer = next(c.cell_contents for c in step.__closure__ if isinstance(c.cell_contents, FlashAdamW))  # type: ignore
    for name, p in model.named_parameters():
        w = start.weights[name]
        bound = 2.0**-16 if p.dim() >= 2 else 0.0
        assert float(((optimizer.master_weight(p) - w).abs() - bound * w.abs()).max()) <= 0
        assert int(optimizer.state[p]["step"]) == start.step
    p = model.token_embedding.weight
    groups = start.exp_avg_sq[0.999]["token_embedding.weight"].view(-1, 32)
    codes, scales = companding.encode_variance(groups)
    assert torch.equal(optimizer.state[p]["exp_avg_sq"].view(-1, 32), codes)
    assert torch.equal(optimizer.state[p]["exp_avg_sq_scale"].view(-1), scales)


def test_start_and_branch_are_the_same_when_made_again(corpus):
    """On one CPU to the bit: what a later command on the same machine relies on."""
    config, data, models, start = started(corpus)
    model = models.get(torch.float32)
    step = torch_adamw(model, start, config.start_beta2)
    branch_batch = next(iter(data.batches(1, 5)))
    model(*branch_batch).mean().backward()
    step(config.lr, config.max_norm)
    found = [p.detach().clone() for p in model.parameters()]

    again, _ = make_start(config, models, data)
    optimizer_step = torch_adamw(model, again, config.start_beta2)
    model(*branch_batch).mean().backward()
    optimizer_step(config.lr, config.max_norm)
    assert all(torch.equal(a, b) for a, b in zip(found, model.parameters(), strict=True))


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "linear8"])
def test_schemes_keep_moments_to_some_percent(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 256, generator=generator)
    scheme = SCHEMES[name]
    m, v = scheme.momentum(x, 3), scheme.variance(x.square() + 0.1, 3)
    assert float((m - x).square().sum() / x.square().sum()) < 1e-3
    assert float((v.sqrt() - (x.square() + 0.1).sqrt()).abs().max()) < 0.1
    assert bool((v >= 0).all())


def test_our_scheme_is_what_the_optimizer_stores():
    p = torch.nn.Parameter(torch.zeros(8, 32))
    opt = FlashAdamW([p], lr=1e-3, betas=(0.9, 0.95))
    m = v = torch.zeros(8, 32)
    for t in range(1, 4):
        p.grad = torch.randn(8, 32, generator=torch.Generator().manual_seed(t))
        m = SCHEMES["flashdist"].momentum(0.9 * m + (1 - 0.9) * p.grad, t)
        v = SCHEMES["flashdist"].variance(0.95 * v + (1 - 0.95) * (p.grad * p.grad), t)
        opt.step()
    state = opt.state[p]
    assert torch.equal(companding.decode_momentum(state["exp_avg"], state["exp_avg_scale"].view(-1)), m)
    assert torch.equal(companding.decode_variance(state["exp_avg_sq"], state["exp_avg_sq_scale"].view(-1)), v)


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_has_256_values_up_to_1(signed):
    table = dynamic_map(signed)
    assert (len(table), float(table.max())) == (256, 1.0)
    assert bool((table.diff() > 0).all())
    assert int((table < 0).sum()) == (127 if signed else 0)


def test_result_files_have_null_for_what_is_not_a_number(tmp_path: Path):
    path = tmp_path / "r.json"
    results.write({"experiment": "x", "a": [float("nan"), 1.0], "b": float("inf")}, path)
    assert json.loads(path.read_text()) == {"experiment": "x", "a": [None, 1.0], "b": None}
    path.write_text("{}")
    with pytest.raises(ValueError, match="not the result"):
        results.read(path)
