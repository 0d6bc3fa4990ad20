"""Functions in processes: whatever they do to their process costs what they were asked about, and nothing else."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import numpy as np
import pytest
from tests.unit import misbehaving_rewards

from corrente.errors import ConfigError
from corrente.score.combined import CombinedScorer, ScorerTerms
from corrente.score.functions import RunProgress
from corrente.score.processes import ProcessSource, path_of
from corrente.testing import samples
from corrente.testing.stages import check_scorer

HERE = Path(__file__).with_name("misbehaving_rewards.py")
T = TypeVar("T")


@asynccontextmanager
async def opened(
    function: str, *, deadline_s: float = 30.0, workers: int = 1, log: Path | None = None, **options: Any
) -> AsyncIterator[CombinedScorer]:
    source = ProcessSource(
        f"{HERE}:{function}", state_of=RunProgress(every=2), options=options, workers=workers, log=log
    )
    try:
        await source.open()
        yield CombinedScorer([(source, ScorerTerms(deadline_s=deadline_s, at_once=workers))])
    finally:
        source.close()


def run(body: Callable[[], Awaitable[T]]) -> T:
    return anyio.run(body)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that only waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def ended(pid: int) -> None:
    with anyio.fail_after(5):
        while not gone(pid):
            await anyio.sleep(0.01)


def test_function_is_called_in_another_process_and_its_answer_is_typed():
    async def main() -> None:
        async with opened("lengths") as panel:
            scored = await panel.score(samples.group(texts=["a", "bcd"]))
            assert [(e.status, e.reward) for e in scored.episodes] == [("ok", 1.0), ("ok", 3.0)]
            assert panel.names == ("lengths",)
            await check_scorer(lambda: panel, samples.group(texts=["a", "bb"]))

    run(main)


def test_async_function_with_options_is_called_too():
    async def main() -> None:
        async with opened("async_lengths", scale=2.0) as panel:
            assert [e.reward for e in (await panel.score(samples.group(texts=["a", "bcd"]))).episodes] == [2.0, 6.0]

    run(main)


def test_alarm_signals_work_for_they_are_in_a_main_thread():
    async def main() -> None:
        async with opened("alarmed") as panel:
            assert [e.reward for e in (await panel.score(samples.group(texts=["a"]))).episodes] == [0.25]

    run(main)


def test_alarm_that_was_left_on_does_not_hit_the_next_call():
    async def main() -> None:
        async with opened("forgets_its_alarm") as panel:
            for _ in range(2):
                assert [e.reward for e in (await panel.score(samples.group(texts=["a"]))).episodes] == [1.0]
                await anyio.sleep(0.1)

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("deed", ["hang", "stubborn"])
def test_call_that_hangs_is_killed_at_its_deadline_and_the_next_is_served(deed: str, tmp_path: Path):
    async def main() -> None:
        async with opened("by_text", deadline_s=0.5) as panel:
            await panel.score(samples.group(texts=[f"pid {tmp_path}"]))
            with anyio.fail_after(10):
                (lost,) = (await panel.score(samples.group(texts=[deed]))).episodes
            assert lost.status == "timeout"
            assert lost.error.startswith("by_text: no answer within")
            await ended(int((tmp_path / "pid").read_text()))
            (fine,) = (await panel.score(samples.group(texts=["fine"]))).episodes
            assert (fine.status, fine.reward) == ("ok", 1.0)

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("deed", ["fork", "leave"])
def test_killed_process_takes_along_what_it_forked(deed: str, tmp_path: Path):
    async def main() -> None:
        async with opened("by_text", deadline_s=1.0) as panel:
            (lost,) = (await panel.score(samples.group(texts=[f"{deed} {tmp_path}"]))).episodes
            assert lost.status in ("timeout", "failed")
            await ended(int((tmp_path / "child").read_text()))

    run(main)


@pytest.mark.parametrize(
    ("deed", "error"),
    [
        ("exit", "exited with code 3"),
        ("_exit", "exited with code 4; last words: gone with a word"),
        ("crash", "was killed by SIGSEGV"),
        ("raise", "by_text: KeyError: 'gold'"),
    ],
)
def test_call_that_ends_its_process_costs_its_episodes_and_says_how(deed: str, error: str):
    async def main() -> None:
        async with opened("by_text") as panel:
            lost = (await panel.score(samples.group(texts=["fine", deed]))).episodes
            assert [e.status for e in lost] == ["failed", "failed"]
            assert all(e.error.startswith("by_text: ") and error in e.error for e in lost)
            assert [e.reward for e in (await panel.score(samples.group(texts=["a", "b"]))).episodes] == [1.0, 1.0]

    run(main)


def test_output_of_a_process_goes_to_the_log_and_is_never_taken_for_an_answer(tmp_path: Path):
    async def main() -> None:
        async with opened("by_text", log=tmp_path / "verifier.log") as panel:
            assert [e.reward for e in (await panel.score(samples.group(texts=["say word"]))).episodes] == [1.0]
            (lost,) = (await panel.score(samples.group(texts=["_exit"]))).episodes
            assert lost.error.endswith("gone with a word")
            assert len(lost.error) < 500

    run(main)
    assert (tmp_path / "verifier.log").read_text().startswith("wordword")


def test_state_and_logs_cross_to_the_process_and_back():
    async def main() -> None:
        async with opened("logs") as panel:
            scored = await panel.score(samples.group(texts=["a", "bcd"], admitted_version=3))
            assert [e.reward for e in scored.episodes] == [6.0, 6.0]
            assert [e.extra["length"] for e in scored.episodes] == [1, 3]
            assert scored.episodes[0].extra["kind"] == "<class 'str'>"
            assert panel.stats()["logged/longest"] == 3.0

    run(main)


def test_column_that_cannot_cross_is_named():
    async def main() -> None:
        async with opened("lengths") as panel:
            (lost,) = (
                await panel.score(samples.group(texts=["a"], prompt=samples.prompt(fields={"odd": object()})))
            ).episodes
            assert lost.error.startswith("lengths: the column 'odd' does not cross processes")
            assert [e.reward for e in (await panel.score(samples.group(texts=["a"]))).episodes] == [1.0]

    run(main)


@pytest.mark.slow
def test_calls_go_to_as_many_processes_as_there_are_workers(tmp_path: Path):
    """Two processes, one of which hangs: the other serves everyone else."""

    async def main() -> None:
        async with opened("by_text", deadline_s=3.0, workers=2) as panel, anyio.create_task_group() as tasks:
            tasks.start_soon(panel.score, samples.group(texts=["stubborn"]))
            await anyio.sleep(0.05)
            with anyio.fail_after(2.5):
                for _ in range(5):
                    assert [e.reward for e in (await panel.score(samples.group(texts=["fine"]))).episodes] == [1.0]
            assert panel.stats()["score/by_text_running"] == 1.0
            tasks.cancel_scope.cancel()

    run(main)


def test_close_ends_processes_that_are_in_the_middle_of_something(tmp_path: Path):
    async def main() -> int:
        async with opened("by_text") as panel:
            await panel.score(samples.group(texts=[f"pid {tmp_path}"]))
            with anyio.move_on_after(0.1):
                await panel.score(samples.group(texts=["hang"]))
            return int((tmp_path / "pid").read_text())

    assert gone(run(main))


@pytest.mark.slow
def test_killed_controller_takes_its_processes_with_it(tmp_path: Path):
    code = f"""
import anyio
from corrente.score.functions import RunProgress
from corrente.score.processes import ProcessSource
from corrente.testing import samples
async def main():
    source = ProcessSource({str(HERE)!r} + ":by_text", state_of=RunProgress())
    await source.open()
    async with anyio.create_task_group() as tasks:
        await source.score_episodes(samples.group(texts=["pid {tmp_path}"]))
        tasks.start_soon(source.score_episodes, samples.group(texts=["hang"]))
        await anyio.sleep(0.2)
        print("hanging", flush=True)
anyio.run(main)
"""
    root = Path(__file__).parents[2]
    controller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root)
    assert controller.stdout is not None
    assert controller.stdout.readline() == b"hanging\n"
    controller.kill()
    controller.wait()
    controller.stdout.close()
    run(lambda: ended(int((tmp_path / "pid").read_text())))


def test_function_that_cannot_be_imported_there_is_refused_at_the_start(tmp_path: Path):
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import os\nif os.environ.get('CORRENTE_TEST_BREAKS'): raise OSError('no verifier')\ndef f(): ...\n"
    )
    source = ProcessSource(f"{broken}:f", state_of=RunProgress())
    os.environ["CORRENTE_TEST_BREAKS"] = "1"
    try:
        with pytest.raises(ExceptionGroup) as caught:
            run(source.open)
    finally:
        del os.environ["CORRENTE_TEST_BREAKS"]
    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigError)
    assert "no verifier" in str(error)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (misbehaving_rewards.closure(), "inner: it is a closure"),
        (misbehaving_rewards.nameless, "lambda: it is a lambda"),
        (functools.partial(misbehaving_rewards.lengths), "lengths: it is a partial"),
        (misbehaving_rewards.Scores(), "Scores: it is an object"),
        (misbehaving_rewards.Scores().method, "method: it is a method"),
    ],
)
def test_function_that_a_process_could_not_import_is_refused_with_the_reason(function: Any, why: str):
    with pytest.raises(ConfigError, match=why):
        ProcessSource(function, state_of=RunProgress())


def test_function_of_a_module_is_known_by_its_path():
    assert path_of(np.linalg.norm).endswith(":norm")
    assert path_of(misbehaving_rewards.lengths) == "tests.unit.misbehaving_rewards:lengths"


def test_process_is_given_conversations_as_messages_and_no_environments():
    plain = samples.group(texts=["2", "two"])
    prompt = msgspec.structs.replace(plain.prompt, messages=({"role": "user", "content": "1 + 1?"},))
    played = tuple(msgspec.structs.replace(e, environment=object()) for e in plain.episodes)
    chat = msgspec.structs.replace(plain, prompt=prompt, episodes=played)

    async def main() -> None:
        async with opened("last_words") as panel:
            assert [e.reward for e in (await panel.score(chat)).episodes] == [1.0, 3.0]

    run(main)
