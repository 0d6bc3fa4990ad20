"""A checkpoint is there completely or not at all, and a failed one leaves the others as they were."""

import random
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest

from corrente.common import rng
from corrente.controller import checkpoint_folder
from corrente.controller.ledger import LedgerState
from corrente.controller.snapshot import Snapshot
from corrente.errors import CheckpointError


class TextLearner:
    """A learner whose whole state is one text; ``fail`` is raised half-way through a save."""

    def __init__(self, state: str = "weights", fail: Exception | None = None) -> None:
        self.state, self.fail = state, fail

    async def step(self, batch):
        return {}

    async def save(self, path: Path) -> None:
        (path / "model.txt").write_text(self.state)
        if self.fail:
            raise self.fail

    async def load(self, path: Path) -> None:
        self.state = (path / "model.txt").read_text()

    def progress(self) -> int:
        return 0


def snapshot(step: int) -> Snapshot:
    return Snapshot(step=step, version=step, next_ticket=0, ledger=LedgerState(), prompts={})


def write(folder: Path, step: int, learner: TextLearner, keep: int = 2) -> Path:
    return anyio.run(checkpoint_folder.CheckpointFolder(folder, keep=keep).write, snapshot(step), learner)


def test_checkpoint_newest_complete_is_chosen_and_older_ones_are_pruned(tmp_path: Path):
    for step in (2, 10, 100):
        write(tmp_path, step, TextLearner(f"weights {step}"))
    assert [p.name for p in checkpoint_folder.complete(tmp_path)] == ["step-000010", "step-000100"]
    newest = checkpoint_folder.latest(tmp_path)
    assert newest is not None
    assert checkpoint_folder.read(newest).step == 100
    assert (newest / "learner" / "model.txt").read_text() == "weights 100"


@pytest.mark.parametrize("torn", ["no marker", "left aside"])
def test_checkpoint_torn_by_a_crash_is_ignored_and_can_be_written_again(tmp_path: Path, torn: str):
    write(tmp_path, 5, TextLearner())
    ruin = tmp_path / ("step-000006" if torn == "no marker" else ".step-000006.writing")
    (ruin / "learner").mkdir(parents=True)
    (ruin / "control.msgpack").write_bytes(b"half")
    assert checkpoint_folder.latest(tmp_path) == tmp_path / "step-000005"
    write(tmp_path, 6, TextLearner("new"))
    assert checkpoint_folder.latest(tmp_path) == tmp_path / "step-000006"
    assert (tmp_path / "step-000006" / "learner" / "model.txt").read_text() == "new"


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), CheckpointError("the disk is full")])
def test_checkpoint_failure_is_a_clear_error_and_earlier_ones_stay(tmp_path: Path, fault: Exception):
    write(tmp_path, 5, TextLearner())
    with pytest.raises(CheckpointError, match=r"step-000006 could not be written: .*(No space|disk is full).*intact"):
        write(tmp_path, 6, TextLearner(fail=fault))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000005"]


def test_checkpoint_that_cannot_be_read_says_so(tmp_path: Path):
    path = write(tmp_path, 5, TextLearner())
    (path / "control.msgpack").write_bytes(b"\x00garbage")
    with pytest.raises(CheckpointError, match=r"step-000005 cannot be read"):
        checkpoint_folder.read(path)


def test_checkpoint_of_a_step_that_is_there_already_is_not_written_again(tmp_path: Path):
    first = write(tmp_path, 5, TextLearner("first"))
    again = write(tmp_path, 5, TextLearner("second"))
    assert first == again
    assert (first / "learner" / "model.txt").read_text() == "first"


def test_checkpoint_that_is_removed_is_gone_at_once_and_what_a_crash_left_is_cleared(tmp_path: Path):
    write(tmp_path, 5, TextLearner())
    for left in (".step-000003.writing", ".step-000001.removing"):
        (tmp_path / left / "learner").mkdir(parents=True)
    write(tmp_path, 6, TextLearner(), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000006"]


def test_checkpoint_folder_clears_what_a_crash_kept_from_being_removed(tmp_path: Path):
    """Killed between the last checkpoint and the removal of older ones, a run resumes at its end and writes no other."""
    for step in (5, 6):
        write(tmp_path, step, TextLearner())
    (tmp_path / ".step-000003.removing" / "learner").mkdir(parents=True)
    write(tmp_path, 6, TextLearner("other"), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000006"]
    assert (tmp_path / "step-000006" / "learner" / "model.txt").read_text() != "other"


def test_random_state_of_users_is_kept_with_a_checkpoint_and_goes_on_from_there(tmp_path: Path):
    random.seed(3)
    np.random.seed(3)
    kept = msgspec.structs.replace(snapshot(5), randomness=rng.state())
    path = anyio.run(checkpoint_folder.CheckpointFolder(tmp_path).write, kept, TextLearner())
    expected = [random.random(), random.gauss(0, 1), float(np.random.normal())]
    for _ in range(3):
        random.random()
    rng.restore(checkpoint_folder.read(path).randomness)
    assert [random.random(), random.gauss(0, 1), float(np.random.normal())] == expected
