"""A resumed run is given what it began with: the same model and data wherever they lie, and by name what is another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.e2e.tiny import write_model

from corrente import config as c
from corrente.config.load import load_config
from corrente.config.paths import absolute_paths
from corrente.data.checkpoint_names import CHECKPOINTS
from corrente.entrypoints import run_folder
from corrente.entrypoints.identity import identify, identify_model
from corrente.errors import ConfigError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


def change_json(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        file = folder / name
        stored = json.loads(file.read_text())
        change(stored)
        file.write_text(json.dumps(stored))

    return work


def change_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, folder / "model.safetensors")


def shard(folder: Path) -> None:
    """Into two files, in another order."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights, reverse=True)
    (folder / "model.safetensors").unlink()
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: weights[name] for name in part}, folder / f"model-{number}.safetensors")


DIFFERENT: dict[str, tuple[Callable[[Path], object], str]] = {
    "config": (change_json("config.json", lambda s: s.update(rms_norm_eps=0.5)), r"rms_norm_eps = 0\.5, .* 1e-06"),
    "weights": (change_tensor, r"1 of its \d+ tensors differ .* 'model\.norm\.weight'"),
    "vocabulary": (change_json("tokenizer.json", lambda s: s["model"]["vocab"].update(z=9)), "another vocabulary"),
    "template": (lambda f: (f / "chat_template.jinja").write_text("{{ messages }}"), ""),
    "special": (change_json("tokenizer_config.json", lambda s: s.update(eos_token="<s>")), "another eos_token"),
}
SAME: dict[str, Callable[[Path], object]] = {
    "moved": lambda folder: None,
    "sharded": shard,
    "saved by another version": change_json("config.json", lambda s: s.update(transformers_version="1", _x="y", new=1)),
    "written otherwise": change_json("tokenizer.json", lambda s: s.update(truncation=None)),
}


def run_of(tmp_path: Path, model: Path, **sections: Any) -> tuple[c.RunConfig, Path]:
    made = c.RunConfig(run=c.Run(dir=str(tmp_path / "runs"), name="x"), model=c.Model(path=str(model)), **sections)
    config, folder = run_folder.create(made)
    run_folder.begin(folder, config)
    return config, folder


def with_model(config: c.RunConfig, model: Path) -> c.RunConfig:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(model)))


@pytest.mark.parametrize("name", SAME)
def test_same_model_elsewhere_goes_on(name: str, tiny: Path, tmp_path: Path):
    config, folder = run_of(tmp_path, tiny)
    other = Path(shutil.copytree(tiny, tmp_path / "other"))
    SAME[name](other)
    assert run_folder.reopen(with_model(config, other)) == folder


@pytest.mark.parametrize("name", [name for name, (_, words) in DIFFERENT.items() if words])
@pytest.mark.parametrize("place", ["there", "elsewhere"])
def test_other_model_is_refused_with_what_is_another(name: str, place: str, tiny: Path, tmp_path: Path):
    own = Path(shutil.copytree(tiny, tmp_path / "own"))
    config, _ = run_of(tmp_path, own)
    other = own if place == "there" else Path(shutil.copytree(tiny, tmp_path / "other"))
    change, words = DIFFERENT[name]
    change(other)
    with pytest.raises(ConfigError, match=rf"resume: model\.path = .*{words}"):
        run_folder.reopen(with_model(config, other))


def test_other_chat_template_is_another_tokenizer(tiny: Path, tmp_path: Path):
    own = Path(shutil.copytree(tiny, tmp_path / "own"))
    DIFFERENT["template"][0](own)
    began = identify_model(own)
    (own / "chat_template.jinja").write_text("{{ bos_token }}")
    assert "another chat template" in began.difference(identify_model(own))


def test_run_without_a_record_is_compared_by_its_path(tiny: Path, tmp_path: Path):
    config, _ = run_folder.create(c.RunConfig(run=c.Run(dir=str(tmp_path)), model=c.Model(path=str(tiny))))
    with pytest.raises(ConfigError, match=r"resume: model\.path = "):
        run_folder.reopen(with_model(config, tmp_path / "other"))


def test_data_elsewhere_goes_on_if_it_is_the_same(tiny: Path, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    config, folder = run_of(tmp_path, tiny, prompts=c.Jsonl(path=str(rows)))
    moved = Path(shutil.copy(rows, tmp_path / "moved.jsonl"))
    other = msgspec.structs.replace(config, prompts=c.Jsonl(path=str(moved)))
    assert run_folder.reopen(other) == folder
    moved.write_text('{"prompt": "b"}\n')
    with pytest.raises(ConfigError, match=r"resume: prompts = .*moved\.jsonl"):
        run_folder.reopen(other)


def test_folder_that_was_renamed_is_the_runs_own(tiny: Path, tmp_path: Path):
    _, folder = run_of(tmp_path, tiny)
    (folder / CHECKPOINTS).mkdir()
    moved = tmp_path / "elsewhere" / "y"
    moved.parent.mkdir()
    folder.rename(moved)
    stale = load_config(moved / "config.toml")
    with pytest.raises(ConfigError, match="there is no run"):
        run_folder.reopen(stale)
    assert run_folder.reopen(run_folder.located(stale, moved / "config.toml")) == moved
    assert run_folder.located(stale, moved / "config.toml", said=["run.name=z"]) == stale
    copied = Path(shutil.copy(moved / "config.toml", tmp_path / "config.toml"))
    assert run_folder.located(stale, copied) == stale


def test_paths_are_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Path):
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    (home / "data" / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (home / "mine.py").write_text("")
    shutil.copytree(tiny, home / "tiny")
    monkeypatch.setenv("HOME", str(home))
    (home / "run.toml").write_text(
        '[model]\npath = "~/tiny"\n[run]\ndir = "~/out"\n[prompts]\nkind = "jsonl"\npath = "~/data/rows.jsonl"\n'
        '[reward]\nfunctions = ["~/mine.py:f"]\n'
    )
    config = load_config(home / "run.toml")
    assert config.model.path == str(home / "tiny")
    assert config.run.dir == str(home / "out")
    assert config.prompts == c.Jsonl(path=str(home / "data" / "rows.jsonl"))
    assert config.reward.functions == (f"{home}/mine.py:f",)
    monkeypatch.chdir(home)
    relative = c.RunConfig(
        model=c.Model(path="tiny"),
        prompts=c.Jsonl(path="data/rows.jsonl"),
        reward=c.Reward(functions=("mine.py:f", "exact_match", "nowhere.py:f")),
        chat=c.Chat(template="{{ messages }}" * 999),
    )
    resolved = absolute_paths(relative)
    assert (resolved.model.path, resolved.run.dir) == (str(home / "tiny"), str(home / "runs"))
    assert resolved.prompts == c.Jsonl(path=str(home / "data" / "rows.jsonl"))
    assert resolved.reward.functions == (f"{home}/mine.py:f", "exact_match", "nowhere.py:f")
    assert absolute_paths(c.RunConfig()).model == c.Model()


def test_broken_or_missing_model_has_no_identity(tmp_path: Path, tiny: Path):
    assert identify(c.RunConfig(model=c.Model(path=str(tmp_path / "none")))).model is None
    broken = Path(shutil.copytree(tiny, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"\xff" * 99)
    assert identify_model(broken).weights == {}


def test_large_file_is_read_in_part_and_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Path):
    from corrente.entrypoints import identity

    monkeypatch.setattr(identity, "WHOLE_BYTES", 10)
    monkeypatch.setattr(identity, "BLOCK_BYTES", 64)
    own = Path(shutil.copytree(tiny, tmp_path / "own"))
    began = identify_model(own)
    weights = {name: tensor + torch.ones_like(tensor) for name, tensor in load_file(own / "model.safetensors").items()}
    save_file(weights, own / "model.safetensors")
    assert "tensors differ" in began.difference(identify_model(own))
