"""cast_model: what keep_fp32 selects, and how kept modules compute."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from flashdist.precision import cast_model
from tests.support.precision_models import BF16, FP16, FP32, LanguageModel, dtypes, hooks, kept, snapshot


class Recorder(nn.Module):
    """A linear layer that notes the dtypes in which it computes."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.linear(x if scale is None else x * scale)
        self.seen.append(y.dtype)
        return y


# keep_fp32: selection


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (["lm_head"], {"lm_head.weight"}),
        (["lm_head.weight"], {"lm_head.weight"}),
        (["*.norm*"], {"blocks.0.norm.weight", "blocks.0.norm.bias"}),
        (["*norm"], {"blocks.0.norm.weight", "blocks.0.norm.bias", "norm.weight", "norm.bias"}),
        (["*.bias"], {"blocks.0.norm.bias", "blocks.0.mlp.bias", "norm.bias"}),
        (["blocks"], {f"blocks.0.{m}.{p}" for m in ("norm", "mlp") for p in ("weight", "bias")}),
        ([nn.LayerNorm], {"blocks.0.norm.weight", "blocks.0.norm.bias", "norm.weight", "norm.bias"}),
        (
            ["embed", nn.LayerNorm],
            {"embed.weight", *(f"{n}norm.{p}" for n in ("", "blocks.0.") for p in ("weight", "bias"))},
        ),
        ((), set()),
    ],
    ids=lambda value: str(sorted(map(str, value))),  # sets print in another order in each process
)
def test_patterns_and_classes(entries, expected):
    model = cast_model(LanguageModel(), keep_fp32=entries)
    assert kept(model) == expected


def test_an_instance_keeps_all_below_it():
    model = LanguageModel()
    cast_model(model, keep_fp32=[model.blocks[0]])
    assert kept(model) == {f"blocks.0.{m}.{p}" for m in ("norm", "mlp") for p in ("weight", "bias")}


def test_a_generator_of_entries():
    assert kept(cast_model(LanguageModel(), keep_fp32=(n for n in ["lm_head"]))) == {"lm_head.weight"}


def test_a_name_is_not_a_prefix():
    model = nn.Sequential()
    model.add_module("head", nn.Linear(2, 2))
    model.add_module("head2", nn.Linear(2, 2))
    assert kept(cast_model(model, keep_fp32=["head"])) == {"head.weight", "head.bias"}


def test_a_module_under_two_names_is_kept_by_either():
    model = nn.Module()
    model.a = model.b = nn.Linear(2, 2)
    model.c = nn.Linear(2, 2)
    cast_model(model, keep_fp32=["b"])
    assert kept(model) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert hooks(model) == {"a": (1, 1)}


def test_kept_16_bit_tensors_become_fp32():
    model = LanguageModel().bfloat16()
    model.lm_head.register_buffer("table", torch.ones(2, dtype=BF16))
    value = model.lm_head.weight.detach().clone()
    cast_model(model, keep_fp32=["lm_head"])
    assert kept(model) == {"lm_head.weight"}
    assert torch.equal(model.lm_head.weight, value.float())
    assert model.lm_head.table.dtype == FP32


@pytest.mark.parametrize(
    "entry",
    ["lm_haed", "LM_HEAD", "norm.weigth", nn.Conv2d, nn.Linear(2, 2)],
    ids=["typo", "case", "leaf", "class", "instance"],
)
def test_an_entry_without_a_match_is_an_error(entry):
    model = LanguageModel()
    before = snapshot(model)
    label = entry if isinstance(entry, str) else "Conv2d" if entry is nn.Conv2d else "Linear instance"
    with pytest.raises(ValueError, match=f"{label}.*matches nothing"):
        cast_model(model, keep_fp32=["norm", entry])
    assert snapshot(model) == before


@pytest.mark.parametrize(
    "entry", ["norm", nn.LayerNorm, nn.Sequential(nn.Linear(2, 2))], ids=["str", "class", "module"]
)
def test_a_bare_entry_is_an_error(entry):
    with pytest.raises(TypeError, match="not a single entry"):
        cast_model(LanguageModel(), keep_fp32=entry)


@pytest.mark.parametrize("entry", [3, None, torch.zeros(2), int], ids=["int", "None", "tensor", "class"])
def test_an_entry_of_another_type_is_an_error(entry):
    with pytest.raises(TypeError, match="name patterns, modules and module classes"):
        cast_model(LanguageModel(), keep_fp32=[entry])


@pytest.mark.parametrize("entries", [["*"], [LanguageModel], ["embed", "blocks", "norm", "lm_head"]], ids=str)
def test_keeping_everything_is_an_error(entries):
    with pytest.raises(ValueError, match="covers every parameter"):
        cast_model(LanguageModel(), keep_fp32=entries)


# keep_fp32: computing


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "entries", [["lm_head"], ["*norm"], ["embed"], ["blocks"], [nn.Linear], ["lm_head.weight"]], ids=str
)
def test_a_model_with_kept_layers_trains(entries, dtype):
    torch.manual_seed(0)
    model = LanguageModel()
    reference = copy.deepcopy(model)
    cast_model(model, dtype, keep_fp32=entries)
    tokens = torch.randint(0, 11, (2, 5))
    logits = model(tokens)
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), reference(tokens), atol=0.05, rtol=0.05)
    logits.float().logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


def test_a_kept_module_computes_in_fp32():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Recorder(), nn.Linear(4, 4))
    exact = copy.deepcopy(model[1])
    cast_model(model, keep_fp32=[Recorder])
    x = torch.randn(3, 4, dtype=BF16)
    hidden = model[0](x)
    assert torch.equal(model[1](hidden), exact(hidden.float()).bfloat16())
    assert model[1].seen == [FP32]
    assert hooks(model) == {"1": (1, 1)}


def test_keyword_inputs_and_nested_outputs():
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, pair, *, extra):
            assert pair[0].dtype == pair[1]["b"].dtype == extra.dtype == FP32
            assert pair[1]["n"].dtype == torch.int64
            assert pair[1]["wide"].dtype == torch.float64
            return {"x": self.linear(pair[0] + extra), "rest": [pair[1]["n"], None, pair[1]["wide"], "text"]}

    model = nn.Sequential(Nested(), nn.Linear(2, 2))
    cast_model(model, keep_fp32=[Nested])
    x = torch.ones(2, dtype=BF16)
    pair = (x, {"b": x.half(), "n": torch.ones(1, dtype=torch.int64), "wide": torch.ones(1, dtype=torch.float64)})
    output = model[0](pair, extra=x)
    assert output["x"].dtype == BF16
    assert [getattr(item, "dtype", item) for item in output["rest"]] == [torch.int64, None, torch.float64, "text"]
    assert pair[0].dtype == BF16


def test_only_the_outermost_kept_module_rounds():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    cast_model(model, keep_fp32=["1", "1.0", "1.1.weight"])
    assert hooks(model) == {"1": (1, 1)}


def test_a_kept_module_with_two_owners_has_one_pair_of_hooks():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.LayerNorm(4)))
    model[1].append(model[0][0])
    cast_model(model, keep_fp32=[nn.Linear])
    assert hooks(model) == {"0.0": (1, 1)}


def test_a_norm_that_runs_natively_gets_no_hook_when_named():
    model = cast_model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), keep_fp32=[nn.BatchNorm1d])
    assert kept(model) == {"1.weight", "1.bias"}
    assert hooks(model) == {}
    assert model(torch.randn(3, 4, dtype=BF16)).dtype == BF16


def test_containers_pass_the_hook_on_to_their_children():
    model = LanguageModel()
    cast_model(model, keep_fp32=["blocks"])
    assert hooks(model) == {"blocks.0.norm": (1, 1), "blocks.0.mlp": (1, 1)}


def test_a_parameter_kept_alone_gets_no_hook():
    model = cast_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), keep_fp32=["1.bias"])
    assert kept(model) == {"1.bias"}
    assert hooks(model) == {}


def test_a_module_with_parameters_of_its_own_and_a_cast_child_gets_no_hook():
    model = nn.Sequential(Recorder(), nn.Linear(4, 4))
    model[0].log_a = nn.Parameter(torch.zeros(4))
    cast_model(model, keep_fp32=["*.log_a"])
    assert kept(model) == {"0.log_a"}
    assert hooks(model) == {}


def test_a_kept_module_without_parameters_computes_in_fp32():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.linspace(0, 1, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table

    x = torch.randn(2, 4, dtype=BF16)
    loud = cast_model(nn.Sequential(Table(), nn.Linear(4, 4)))
    with pytest.raises(RuntimeError, match="dtype"):
        loud(x)
    model = cast_model(nn.Sequential(Table(), nn.Linear(4, 4)), keep_fp32=["0"])
    assert model(x).dtype == BF16
    assert torch.equal(model[0](x), (x.float() + model[0].table).bfloat16())


def test_spectral_norm_trains_when_kept():
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    cast_model(model, keep_fp32=[model[0]])
    model(torch.randn(2, 4, dtype=BF16)).sum().backward()
    assert model[0].parametrizations.weight.original.grad.dtype == FP32


def test_kept_modules_can_be_copied_and_pickled():
    model = cast_model(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), keep_fp32=[nn.LayerNorm])
    x = torch.randn(3, 4, dtype=BF16)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for other in copies:
        assert hooks(other) == {"1": (1, 1)}
        assert dtypes(other) == dtypes(model)
        assert torch.equal(other(x), model(x))
    # A copy can be cast again on its own.
    cast_model(copies[0])
    assert (hooks(copies[0]), hooks(model)) == ({}, {"1": (1, 1)})


def test_the_state_dict_is_that_of_the_model():
    model = LanguageModel()
    names = list(model.state_dict())
    assert list(cast_model(model, keep_fp32=["lm_head"]).state_dict()) == names


def test_a_second_cast_replaces_the_first():
    model = LanguageModel()
    cast_model(model, BF16, keep_fp32=["lm_head", "norm"])
    cast_model(model, BF16, keep_fp32=["lm_head", "norm"])
    assert hooks(model) == {"lm_head": (1, 1), "norm": (1, 1)}
    cast_model(model, FP16, keep_fp32=["norm"])
    assert hooks(model) == {"norm": (1, 1)}
    assert kept(model) == {"norm.weight", "norm.bias"}
    assert not model.lm_head._forward_pre_hooks_with_kwargs
    assert model(torch.tensor([[1, 2]])).dtype == FP16


def test_hooks_of_others_stay_through_a_second_cast():
    model = LanguageModel()
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    cast_model(model, keep_fp32=["lm_head"])
    cast_model(model)
    assert hooks(model) == {"lm_head": (0, 1)}


def test_hooks_trace_without_a_graph_break():
    model = cast_model(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), keep_fp32=["1"])
    x = torch.randn(2, 4, dtype=BF16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
