"""OUTPUT_DIR/checkpoint-N on file systems with symbolic links, with hard links alone, and with neither."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from corrente.trl.checkpoint_links import link_checkpoint, link_file, linked_checkpoint


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


@pytest.fixture(params=["symbolic", "hard", "none"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "symbolic":
        monkeypatch.setattr(Path, "symlink_to", refuse)
    if request.param == "none":
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    return str(request.param)


def write_checkpoint(output: Path, step: int) -> Path:
    target = output / "runs" / "x" / "checkpoints" / f"step-{step:06}" / "learner"
    target.mkdir(parents=True)
    (target / "model.safetensors").write_text(f"weights {step}")
    return target


def test_checkpoint_has_the_files_of_its_run_and_goes_with_them(links: str, tmp_path: Path):
    targets = {step: write_checkpoint(tmp_path, step) for step in (1, 2)}
    (tmp_path / "checkpoint-9").mkdir()  # of somebody else
    for step, target in targets.items():
        link_checkpoint(tmp_path / f"checkpoint-{step}", target)
        link_checkpoint(tmp_path / f"checkpoint-{step}", target)
        assert (tmp_path / f"checkpoint-{step}" / "model.safetensors").read_text() == f"weights {step}"
        assert linked_checkpoint(tmp_path / f"checkpoint-{step}") == target
    assert (tmp_path / "checkpoint-1").is_symlink() == (links == "symbolic")
    (targets[1] / "model.safetensors").unlink()
    targets[1].rmdir()
    link_checkpoint(tmp_path / "checkpoint-2", targets[2])
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-9"]
    assert linked_checkpoint(tmp_path / "checkpoint-9") is None


def test_checkpoint_survives_a_renamed_output_folder(links: str, tmp_path: Path):
    output = tmp_path / "out"
    link_checkpoint(output / "checkpoint-1", write_checkpoint(output, 1))
    output.rename(tmp_path / "renamed")
    found = linked_checkpoint(tmp_path / "renamed" / "checkpoint-1")
    assert found is not None
    assert (found / "model.safetensors").read_text() == "weights 1"


def test_file_is_linked_or_copied(links: str, tmp_path: Path):
    (tmp_path / "a").write_text("text")
    link_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "text"
    assert (tmp_path / "b").is_symlink() == (links == "symbolic")
    assert ((tmp_path / "b").stat().st_ino == (tmp_path / "a").stat().st_ino) == (links != "none")
