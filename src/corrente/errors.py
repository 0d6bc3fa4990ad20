"""One exception tree; every leaf also inherits the standard type a caller would expect.

CorrenteError
├── ConfigError(ValueError)           a knob is wrong; raised before a model is loaded        -> exit code 2
├── RolloutError(RuntimeError)        one episode failed; recorded, charged to the budget, never fatal by itself
│   ├── GenerationError               the engine refused or lost this request
│   ├── RewardError                   a reward function raised, hung or answered with the wrong shape
│   └── DeadlineError(TimeoutError)   the episode or its scoring ran past its deadline
├── AlignmentError(ValueError)        tokens, log-probs, spans, ... of one sequence disagree in length
├── PipelineError(RuntimeError)       the run cannot go on                                     -> exit code 1
│   ├── StallError(TimeoutError)      nothing moved for too long; says who waits for what, since when
│   ├── FailureBudgetError            one boundary fails systematically
│   ├── NothingToLearnError           every group is untrainable
│   ├── DivergedError(ArithmeticError) non-finite loss or gradient
│   ├── AlarmError                    samples left their band, and alarm.action is stop
│   ├── SyncError                     new weights could not be brought to every engine
│   ├── WorkerDied                    a worker process ended; carries its name and its last output
│   └── CheckpointError(OSError)      a checkpoint could not be written or read
├── FetchError(OSError)               a model could not be downloaded, verified or converted    -> exit code 1
├── Interrupted                       a second Ctrl-C: stopped at once, without a checkpoint    -> exit code 130
├── EndOfStream                       the feed is closed; nothing more will be admitted
└── LedgerError(AssertionError)       our own bug: a prompt settled twice, or a bound broken

A bad rollout is data; a bad pipeline is a crash.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path


class CorrenteError(Exception):
    """Root of the tree."""


class ConfigError(CorrenteError, ValueError):
    """A setting is wrong; the message says what was given, what is allowed and which key to change."""


class RolloutError(CorrenteError, RuntimeError):
    """One episode failed. The pipeline records it and goes on within the failure budget."""


class GenerationError(RolloutError):
    """The engine refused or lost one request."""


class RewardError(RolloutError):
    """A reward function failed; the message begins with its name."""


class DeadlineError(RolloutError, TimeoutError):
    """An episode, or its scoring, did not end before its deadline."""


class AlignmentError(CorrenteError, ValueError):
    """Arrays that describe the same tokens differ in length. Never padded, never cut."""


class PipelineError(CorrenteError, RuntimeError):
    """The run cannot continue."""


class StallError(PipelineError, TimeoutError):
    """No stage moved within the watchdog's patience."""


class FailureBudgetError(PipelineError):
    """One boundary (engine, environment, a reward function) failed too often."""


class NothingToLearnError(PipelineError):
    """Every group for many batches in a row was untrainable."""


class DivergedError(PipelineError, ArithmeticError):
    """Loss or gradient is not finite. Never skipped silently."""


class AlarmError(PipelineError):
    """A number that a step reports of its samples left its band, and ``alarm.action`` is "stop"."""


class SyncError(PipelineError):
    """A publish failed; every engine still holds the old version."""


class WorkerDied(PipelineError):
    """A child process ended while it was needed."""


_NOT_THEIRS = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")


def described(error: BaseException) -> str:
    """One line about an exception of users' code: its class, its message, and the last line of theirs that it came through."""
    text = error_text(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THEIRS)]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


class CheckpointError(PipelineError, OSError):
    """A checkpoint could not be written, or the one named cannot be read."""


class FetchError(CorrenteError, OSError):
    """A model could not be downloaded, verified or converted."""


class Interrupted(CorrenteError):
    """Asked a second time to stop. Not KeyboardInterrupt, which asyncio lets tear through the tasks that clean up."""


class EndOfStream(CorrenteError):
    """The buffer is closed for admission."""


class LedgerError(CorrenteError, AssertionError):
    """An invariant of corrente itself is broken: please report it."""


def error_text(error: BaseException) -> str:
    """The error's type and message, as valid Unicode; without the message where ``str(error)`` raises."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # of a class whose author did not try it
        return name
    return f"{name}: {text}".encode("utf-8", "replace").decode()


def root_cause(error: BaseException) -> BaseException:
    """The failure that decides, of those inside nested exception groups: an interrupt, else a dead worker (every call that waited
    for it fails too), else one that ends a run, else one of ours, else the first.

    Environments and scorers may use task groups of their own; what they raise is then judged like a plain exception.
    """
    leaves = list(_leaves(error))
    interrupts = (e for e in leaves if not isinstance(e, Exception))
    deaths = (e for e in leaves if isinstance(e, WorkerDied))
    fatal = (e for e in leaves if isinstance(e, PipelineError | LedgerError))
    ours = (e for e in leaves if isinstance(e, CorrenteError))
    return next((found for kind in (interrupts, deaths, fatal, ours) for found in kind), leaves[0])


@contextmanager
def raising_root_cause() -> Generator[None]:
    """Replace an exception group that leaves the block by its root cause, whose ``__cause__`` it is where it holds more."""
    group: BaseExceptionGroup[BaseException] | None = None
    try:
        yield
    except BaseExceptionGroup as caught:
        group = caught
    if group is not None:
        raise root_cause(group) from (group if len(list(_leaves(group))) > 1 else None)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            yield from _leaves(inner)  # pyright: ignore[reportUnknownArgumentType]
    else:
        yield error


def while_running(error: Exception, *, begun: bool) -> Exception:
    """A ConfigError says that nothing was trained. Data that is found wrong once a run has ``begun`` has failed the run."""
    return PipelineError(str(error)) if begun and isinstance(error, ConfigError) else error
