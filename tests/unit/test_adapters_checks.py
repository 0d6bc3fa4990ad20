"""What a config may ask of adapters: refused in one line from files alone, with the nearest names."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refusal

from corrente import config as c
from corrente.adapters import checks
from corrente.errors import ConfigError

NAMES = (
    *("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.v_proj.weight"),
    *("model.layers.0.mlp.down_proj.weight", "model.norm.weight"),
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the header of a weight file, and no weights."""
    _write_header(tmp_path / "model.safetensors", NAMES)
    return tmp_path


def _write_header(file: Path, names: tuple[str, ...]) -> None:
    table = json.dumps({"__metadata__": {}} | {name: {"dtype": "F32", "shape": [1]} for name in names}).encode()
    file.write_bytes(struct.pack("<Q", len(table)) + table)


def _check(model: Path | None, **keys: Any) -> None:
    checks.check(c.RunConfig(adapters=c.Lora(**keys)), model=model)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"targets": ()}, r"adapters\.targets = \[\]: give at least one"),
        ({"targets": ("all-linear", "q_proj")}, r'"all-linear" stands alone'),
        ({"targets": ("q_proj", "")}, "none of them empty"),
        ({"targets": ("qproj",)}, r"adapters\.targets = 'qproj': no layer .* nearest are q_proj"),
        ({"targets": ("mlp.up_proj",)}, r"adapters\.targets = 'mlp\.up_proj': .* nearest are .*down_proj"),
        ({"target_parameters": ("q_proj.bias",)}, r"target_parameters = 'q_proj\.bias': .* nearest are q_proj\.weight"),
        ({"target_parameters": ("q_proj.weight",), "dropout": 0.1}, r"adapters\.dropout = 0\.1: it must be 0"),
        ({"init": "/nowhere"}, r"adapters\.init = '/nowhere': it must be a peft directory"),
    ],
)
def test_adapters_checks_refuses_by_name(keys: dict[str, Any], words: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        _check(model, **keys)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("accepted", "neighbour", "words"),
    [
        ({}, {"targets": ()}, "give at least one"),
        ({"targets": ("q_proj", "self_attn.v_proj", "lm_head")}, {"targets": ("q_proj", "mlp.v_proj")}, "mlp.v_proj"),
        ({"targets": ("model.layers.0.mlp.down_proj",)}, {"targets": ("model.layers.1.mlp.down_proj",)}, "nearest are"),
        (
            {"targets": (), "target_parameters": ("q_proj.weight",)},
            {"targets": (), "target_parameters": ("q_proj.bias",)},
            "nearest are q_proj.weight",
        ),
    ],
)
def test_adapters_checks_accepts(accepted: dict[str, Any], neighbour: dict[str, Any], words: str, model: Path) -> None:
    assert refusal(_check, model, **accepted) == ""
    assert words in refusal(_check, model, **neighbour)
    assert refusal(checks.check, c.RunConfig(), model=model) == "", "nothing is asked of names without adapters"


def test_adapters_checks_accepts_any_name_where_files_do_not_tell(tmp_path: Path, model: Path) -> None:
    weights = model / "model.safetensors"
    told = weights.read_bytes()
    for folder, content in ((None, told), (tmp_path / "empty", told), (model, b"torn")):
        weights.write_bytes(content)
        assert refusal(_check, folder, targets=("anything",)) == ""
    weights.write_bytes(told)
    assert "'anything': no layer" in refusal(_check, model, targets=("anything",))


def test_adapters_checks_accepts_parameters_that_a_model_fuses_when_it_is_loaded(model: Path) -> None:
    fused: dict[str, Any] = {"targets": ("q_proj",), "target_parameters": ("experts.gate_up_proj",)}
    assert "experts.gate_up_proj" in refusal(_check, model, **fused)
    _write_header(model / "model.safetensors", (*NAMES, "model.layers.0.mlp.experts.0.up_proj.weight"))
    assert refusal(_check, model, **fused) == ""


def test_names_of_a_model_in_several_files_come_from_its_index(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(NAMES, "a")}))
    with pytest.raises(ConfigError, match="nearest are q_proj"):
        _check(tmp_path, targets=("qproj",))


@pytest.mark.parametrize(("key", "there"), [("rank", 8), ("alpha", 64)])
def test_start_that_has_another_rank_or_alpha_is_refused(key: str, there: int, tmp_path: Path) -> None:
    given = {"peft_type": "LORA", "r": 16, "lora_alpha": 32} | {{"rank": "r", "alpha": "lora_alpha"}[key]: there}
    (tmp_path / "adapter_config.json").write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=rf"adapters\.{key} = \d+: adapters\.init = .* has {there}"):
        _check(None, init=str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        _check(None, init=str(tmp_path))


def test_missing_peft_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r'adapters\.kind = "lora" needs peft: pip install "corrente\[lora\]"'):
        _check(None)


def test_dropout_is_allowed_with_a_word_of_caution() -> None:
    (line,) = checks.cautions(c.RunConfig(adapters=c.LoraMerged(dropout=0.1)))
    assert "adapters.dropout = 0.1" in line
    assert checks.cautions(c.RunConfig(adapters=c.Lora())) == checks.cautions(c.RunConfig()) == []
