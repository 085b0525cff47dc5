from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml
from config import UserError, build, load, to_tree, to_yaml
from pretrain_config import PretrainConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "pretrain").glob("*.yaml"))


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    steps: int = 10
    flag: bool = False
    kind: Literal["left", "right"] | None = "left"
    pair: tuple[float, float] | None = None
    path: Path | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")


@dataclass(frozen=True)
class Outer:
    name: str = "a"
    inner: Inner = field(default_factory=Inner)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def test_values_come_from_the_file_and_overrides_win(tmp_path):
    path = written(tmp_path, "name: b\ninner:\n  rate: 1e-4\n  pair: [0.9, 1]\n  path: ~/x\n")
    config = load(Outer, path, ["inner.steps=7", "inner.flag=true", "inner.steps=8", "inner.kind=null"])
    assert config == Outer("b", Inner(1e-4, 8, True, None, (0.9, 1.0), Path.home() / "x"))
    assert load(Outer, None) == Outer()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("inner.stesp=7", r"unknown key 'inner.stesp' \(did you mean 'steps'\?\); section inner has rate, steps"),
        ("iner.steps=7", r"unknown key 'iner' \(did you mean 'inner'\?\); the config has name, inner"),
        ("name.steps=7", "unknown key|name must be text"),
        ("inner=3", "inner is a section"),
        ("inner.steps=many", "inner.steps must be a whole number, got 'many'"),
        ("inner.steps=1.5", "inner.steps must be a whole number, got 1.5"),
        ("inner.steps=true", "inner.steps must be a whole number, got True"),
        ("inner.flag=1", "inner.flag must be true or false, got 1"),
        ("inner.rate=fast", "inner.rate must be a number, got 'fast'"),
        ("inner.rate=null", "inner.rate must be a number, got None"),
        ("inner.steps=0", "inner: steps must be at least 1, got 0"),
        ("inner.kind=lefd", r"inner.kind must be one of left, right; got 'lefd' \(did you mean 'left'\?\)"),
        ("inner.pair=[1]", "inner.pair must be a list of 2 values"),
        ("inner.pair=[1, x]", r"inner.pair\[1\] must be a number"),
        ("inner.steps", "is no override: write key.of.a.field=value"),
        ("inner.steps=[1", r"inner.steps must be a whole number, got '\[1'"),
        ("inner.pair=[1,", r"inner.pair must be a list of 2 values, got '\[1,'"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(override, message):
    with pytest.raises(UserError, match=message) as caught:
        load(Outer, None, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inner:\n  steps: 1\n  steps: 2\n", "line 3, column 3: no valid YAML: the key 'steps' is written twice"),
        ("inner: [1,\n", "line 2, column 1: no valid YAML"),
        ("- a\n", "must hold `key: value` lines, but holds a list"),
        ("a: b: c\n", "line 1, column 5: no valid YAML: mapping values are not allowed"),
        ("inner:\n  pair: !!python/tuple [1, 2]\n", "no valid YAML"),
        ("? [a]\n: b\n", "no valid YAML"),
        ("name: 2024-13-45\n", "no valid YAML: month must be"),
        ("name: !!int abc\n", "no valid YAML"),
        ("name: !!timestamp abc\n", "no valid YAML"),
        ("name: !!bool maybe\n", "no valid YAML"),
        ("[" * 5000, "no valid YAML"),
        ("inner:\n  steps: " + "1" * 5000, "no valid YAML"),
    ],
    ids=lambda text: text[:20],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as caught:
        load(Outer, written(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["2024-13-45", "!!int abc", "[" * 5000])
def test_an_override_that_is_no_yaml_is_text(value):
    assert load(Outer, None, [f"name={value}"]).name == value


def test_a_pattern_needs_no_quotes():
    assert load(Outer, None, ["name=*.txt"]).name == "*.txt"


def test_a_missing_or_binary_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none.yaml cannot be read: No such file"):
        load(Outer, tmp_path / "none.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="binary cannot be read"):
        load(Outer, tmp_path / "binary")


def test_a_field_without_a_default_must_be_given():
    @dataclass(frozen=True)
    class Needs:
        a: int
        b: int = 2

    with pytest.raises(UserError, match="a is missing"):
        build(Needs, {"b": 3})
    assert build(Needs, {"a": 1}) == Needs(1)


def test_an_empty_section_takes_its_defaults(tmp_path):
    assert load(Outer, written(tmp_path, "inner:\n"), ["inner.steps=3"]).inner == Inner(steps=3)
    assert load(Outer, written(tmp_path, "")) == Outer()


def test_a_config_written_as_yaml_reads_back_equal(tmp_path):
    config = Outer("x", Inner(1e-7, 3, True, "right", (0.1, 0.2), Path("/a/b")))
    assert load(Outer, written(tmp_path, to_yaml(config))) == config
    assert yaml.safe_load(to_yaml(config)) == to_tree(config)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configs_that_are_shipped_are_valid_and_read_back(path, tmp_path):
    config = load(PretrainConfig, path)
    assert load(PretrainConfig, written(tmp_path, to_yaml(config))) == config


def test_the_configs_exist():
    assert {"gpt2-124m", "llama-1b"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.width=100", "model: width 100 is not a multiple of heads 12"),
        ("model.kv_heads=5", "model: heads 12 is not a multiple of kv_heads 5"),
        ("train.max_norm=0", "max_norm must be above 0"),
        ("train.final_lr=2", "final_lr is a share"),
        ("optimizer.lr=-1", "lr must be above 0"),
        ("optimizer.name=adamw", r"flash_adamw.*\(did you mean 'flash_adamw'|torch_adamw"),
        ("parallel.strategy=fsdp", r"did you mean 'fsdp2'\?"),
        ("parallel.strategy=hsdp", "hsdp needs shard_ranks"),
        ("run.keep_last=0", "keep_last must be at least 1"),
    ],
)
def test_values_out_of_range_are_refused(override, message):
    with pytest.raises(UserError, match=message):
        load(PretrainConfig, None, [override])


def test_zero1_takes_our_optimizers_only():
    with pytest.raises(UserError, match="ddp_zero1 shards the states of flashdist's optimizers only"):
        load(PretrainConfig, None, ["parallel.strategy=ddp_zero1", "optimizer.name=torch_adamw"])


def test_the_learning_rate_warms_up_and_ends_at_its_share():
    config = load(PretrainConfig, None, ["train.steps=100", "train.warmup=10", "optimizer.lr=1"])
    rates = [config.learning_rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[100] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert config.learning_rate(1000) == rates[100]
    short = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=5))
    assert short.learning_rate(4) == pytest.approx(0.5)
