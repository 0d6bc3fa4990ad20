"""Kill -9 and go on, again and again, then compare with a run that nobody killed.

    python -m tests.e2e.resume_harness --job plain --kills 25 --seed 0

A part of a run is a forked child that runs `corrente run` with everything imported already, so that a kill costs a second and not
ten. It is killed in one of three ways, drawn from the seed:

    time      by SIGKILL from outside, after a fraction of what the whole run takes
    file      by itself, at its n-th touch of a file or folder of the run: in the middle of writing a checkpoint, between its
              rename and the flush after it, while an old one is removed, before a line of metrics
    call      by itself, when one of ``POINTS`` is called or returns for the n-th time: in the optimizer's step, while weights are
              exported, staged or landed, while the learner saves

After each kill nothing may be left: no process, no shared memory, no temporary file. After the last part every prompt was trained
once, no step is recorded twice, and, where the job is deterministic, numbers, samples, weights, optimizer and random state equal
those of the whole run, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tests.e2e.left_behind import shared_memory_left
from tests.e2e.resume_compare import ROWS, STEPS, check, record
from tests.e2e.tiny import tiny_config, write_prompts

from corrente.cli import main as cli
from corrente.config.load import dump_config
from corrente.controller import checkpoint_folder

TOUCHES = frozenset({"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "shutil.copyfile"})
POINTS = frozenset(
    {
        "LearnerCore.step",
        "SingleDevice.step",
        "_Direct.export",
        "Publisher.stage",
        "Publisher.land",
        "EngineCore.apply",
        "LearnerCore.save",
        "Full.write",
        "Lora.write",
        "CheckpointFolder.write",
        "_write_flushed",
        "_flush_folder",
        "_remove",
        "runfolder.keep",
        "_keep_lines",
        "JsonlSink._write",
        "Pipeline._settle",
        "WindowBuffer.release",
    }
)
REWARDS = """
import os
import random

import numpy as np

LOG = {log!r}

async def noisy(prompts, completions, answer):
    \"\"\"Draws from both global generators, and says in a file what it was asked.\"\"\"
    with open(LOG, "a") as file:
        file.write(prompts[0] + "\\n")
    return [
        sum(c == a for c in text) / max(1, len(text)) + 0.1 * random.random() + 0.1 * float(np.random.random())
        for text, a in zip(completions, answer)
    ]
"""
SYNCHRONOUS = ("buffer.kind=none", "runtime.kind=inline")
ASYNCHRONOUS = ("buffer.kind=window", "staleness.max=2", "runtime.kind=inline")


class Job(NamedTuple):
    """A run of ``STEPS`` steps over ``ROWS`` prompts. ``exact``: it can be compared bit for bit. ``epochs`` in which a text may
    be asked for again."""

    overrides: tuple[str, ...]
    exact: bool = True
    epochs: int = 1


JOBS: dict[str, Job] = {
    "plain": Job((*SYNCHRONOUS, "checkpoint.every=2", "learner.schedule=cosine", "learner.warmup_steps=3")),
    "every": Job((*SYNCHRONOUS, "checkpoint.every=1", "checkpoint.keep=1", "algo.num_iterations=2")),
    "lora": Job((*SYNCHRONOUS, "checkpoint.every=1", "adapters.kind=lora", "adapters.dropout=0.2", "adapters.rank=4")),
    "evaluated": Job((*SYNCHRONOUS, "checkpoint.every=2", "eval.every=2", "eval.samples=2", "algo.beta=0.05")),
    "mixture": Job(
        (
            *SYNCHRONOUS,
            "checkpoint.every=2",
            "prompts.kind=mixture",
            'prompts.sources=[{kind="jsonl", name="first", path="WHERE/prompts.jsonl", weight=3, weight_end=0.5, epochs=3}, '
            '{kind="jsonl", name="second", path="WHERE/more.jsonl", weight=1, weight_end=2, epochs=3}]',
            "filter.pass_reward=0.35",
            "learner.lr=0.001",
            "filter.pass_rate_max=0.6",
        ),
        epochs=3,
    ),
    "window": Job((*ASYNCHRONOUS, "checkpoint.every=1", "buffer.window=3"), exact=False),
    "versions": Job((*ASYNCHRONOUS, "checkpoint.every=3", "sync.every=3", "inflight.kind=resume"), exact=False),
    "procs": Job(
        ("runtime.kind=procs", "runtime.placement=shared", "staleness.max=1", "checkpoint.every=1"), exact=False
    ),
}


class Kill(NamedTuple):
    """``at``: seconds, or the number of the touch or call."""

    how: Literal["time", "file", "call", "never"]
    at: float = 0


class Part(NamedTuple):
    """How one part of a run ended."""

    kill: Kill
    killed: bool
    status: int
    said: str


# ---- one part ---------------------------------------------------------------------------------------------------------------


def play(config: Path, folder: Path, kill: Kill, *, aside: Path) -> Part:
    """Fork a child that runs ``config`` until its end or its kill; it resumes where there is a checkpoint."""
    said = aside / "said.txt"
    pid = os.fork()
    if pid == 0:
        _child(config, folder, kill, aside=aside, said=said)
    if kill.how == "time":
        _kill_after(pid, kill.at)
    _, status = os.waitpid(pid, 0)
    _nothing_is_left(pid, aside)
    return Part(kill, os.WIFSIGNALED(status), status, said.read_text() if said.exists() else "")


def _child(config: Path, folder: Path, kill: Kill, *, aside: Path, said: Path) -> None:
    """Never returns."""
    os.setsid()
    tempfile.tempdir = str(aside / "tmp")
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    code = 99
    try:
        resumes = checkpoint_folder.latest(folder / "checkpoints") is not None
        sys.argv = ["corrente", "run", str(config), *(["--resume"] if resumes else [])]
        _scatter(os.getpid() if resumes else 0)
        if not resumes:
            shutil.rmtree(folder, ignore_errors=True)
        _arm(kill, str(folder), aside / "touches.txt")
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        os.write(2, repr(error).encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _scatter(seed: int) -> None:
    """The random state a process begins with: the same for every new run, and another one for every one that goes on."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _arm(kill: Kill, folder: str, count_in: Path) -> None:
    """Have this process kill itself at ``kill``; without one, keep account of how many touches and calls there are."""
    counts = Counter[str]()

    def count(how: str) -> None:
        counts[how] += 1
        if kill.how == how and counts[how] >= kill.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def touch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in TOUCHES and (event in ("os.remove", "os.rmdir") or str(arguments[0]).startswith(folder)):
            count("file")

    def call(frame: Any, event: str, _: object) -> None:
        if event in ("call", "return") and frame.f_code.co_qualname in POINTS:
            count("call")

    if kill.how in ("file", "never"):
        sys.addaudithook(touch)
    if kill.how in ("call", "never"):
        sys.setprofile(call)
    if kill.how == "never":
        end = os._exit

        def tell(code: int) -> None:
            sys.setprofile(None)
            count_in.write_text(json.dumps(counts))
            end(code)

        os._exit = tell  # this process is the harness's own child


def _kill_after(pid: int, seconds: float) -> None:
    """SIGKILL the child, unless it ends before."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(min(0.01, max(0.0, until - time.monotonic())))
    os.kill(pid, signal.SIGKILL)


def _nothing_is_left(session: int, aside: Path) -> None:
    """No process of the child's session within 10 s, no shared memory that was not there, no temporary file."""
    until = time.monotonic() + 10
    while alive := _processes_of(session):
        if time.monotonic() > until:
            raise AssertionError(f"processes {alive} outlive the run")
        time.sleep(0.05)
    left = list((aside / "tmp").iterdir())
    assert not left, f"temporary files are left: {left}"


def _processes_of(session: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


# ---- a whole run, and one in parts --------------------------------------------------------------------------------------------


class Stage:
    """The folder in which one job is run, whole and in parts; the model and the prompts are the same for both."""

    def __init__(self, where: Path, name: str) -> None:
        self.job = JOBS[name]
        self.where = where
        (where / "tmp").mkdir(parents=True, exist_ok=True)
        write_prompts(where / "more.jsonl", count=ROWS, seed=7)
        self.shm = set(Path("/dev/shm").iterdir())

    def config(self, run: str) -> tuple[Path, Path, Path]:
        """The config's file, the run's folder, and the log of its rewards."""
        log = self.where / f"{run}.rewards"
        rewards = self.where / f"{run}.py"
        rewards.write_text(REWARDS.format(log=str(log)))
        config = tiny_config(
            self.where,
            f'reward.functions=["{rewards}:noisy"]',
            f"run.name={run}",
            f"run.steps={STEPS}",
            "filter.zero_variance=keep",
            "observe.samples=1000",
            *(() if any(o.startswith("eval.") for o in self.job.overrides) else ("eval.every=0",)),
            *(override.replace("WHERE", str(self.where)) for override in self.job.overrides),
            prompts=ROWS,
        )
        path = self.where / f"{run}.toml"
        path.write_text(dump_config(config))
        return path, self.where / "runs" / run, log

    def whole(self) -> tuple[Path, float, Counter[str]]:
        """The folder of a run that nobody kills, how long it took, and how many touches and calls there were."""
        path, folder, _ = self.config("whole")
        began = time.monotonic()
        part = play(path, folder, Kill("never"), aside=self.where)
        assert part.status == 0, part.said
        assert len(record(folder)["steps"]) == STEPS, f"the whole run is shorter than {STEPS} steps: {part.said}"
        counts = Counter(json.loads((self.where / "touches.txt").read_text()))
        return folder, time.monotonic() - began, counts

    def in_parts(self, run: str, kills: Sequence[Kill]) -> list[Part]:
        """Run, with these kills, then to the end, then once more: a run resumed after its last step takes no further step."""
        path, folder, _ = self.config(run)
        parts = [play(path, folder, kill, aside=self.where) for kill in kills]
        parts.append(play(path, folder, Kill("file", 1 << 40), aside=self.where))
        for part in parts:
            assert part.killed or part.status == 0, f"{part.kill}: {part.said}"
        assert not parts[-1].killed
        before = record(folder)
        again = play(path, folder, Kill("file", 1 << 40), aside=self.where)
        assert again.status == 0, again.said
        assert record(folder) == before, "a run resumed at its end took a step"
        assert not (left := shared_memory_left(self.shm)), f"shared memory is left: {left}"
        return parts


def draw(rng: random.Random, *, whole_s: float, counts: Counter[str], size: int) -> list[Kill]:
    """``size`` kills: the first anywhere in the run as it was when nobody killed it, the later ones earlier in what is left."""
    kills: list[Kill] = []
    for number in range(size):
        how, part = rng.choice(["time", "file", "call"]), 1 / (1 + number)
        most = (whole_s if how == "time" else counts[how]) * part
        kills.append(Kill(how, rng.uniform(0, most) if how == "time" else rng.randint(1, max(1, int(most)))))
    return kills


def campaign(where: Path, job: str, *, kills: int, seed: int, at_most: int = 6, tell: Any = print) -> int:
    """Runs in parts until ``kills`` of them were really killed; returns how many were. AssertionError names the seed's part."""
    stage, rng, done, number = Stage(where, job), random.Random(f"{job}/{seed}"), 0, 0
    whole, whole_s, counts = stage.whole()
    tell(f"{job}: {whole_s:.1f} s, {dict(counts)}")
    while done < kills:
        run = f"parts-{number}"
        planned = draw(rng, whole_s=whole_s, counts=counts, size=rng.randint(1, at_most))
        try:
            parts = stage.in_parts(run, planned)
            killed = sum(part.killed for part in parts)
            _, folder, log = stage.config(run)
            check(folder, whole, log, exact=stage.job.exact, begun=(len(planned) + 2) * stage.job.epochs)
        except AssertionError as error:
            raise AssertionError(f"{job}, seed {seed}, run {number}, kills {planned}: {error}") from error
        shutil.rmtree(folder)
        done, number = done + killed, number + 1
        tell(
            f"{job}: run {number}: {killed} kills ({', '.join(f'{k.how} {k.at:.4g}' for k in planned)}), {done} in all"
        )
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=[*JOBS, "all"], default="plain")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    jobs = list(JOBS) if arguments.job == "all" else [arguments.job]
    for job in jobs:
        with tempfile.TemporaryDirectory(prefix="corrente-resume-") as folder:
            done = campaign(Path(folder), job, kills=arguments.kills, seed=arguments.seed)
        sys.stdout.write(f"{job}: {done} kills, all well\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
