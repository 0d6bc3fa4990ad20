"""A scoring process from the controller's side: start it, ask it one thing at a time, kill it.

Questions and answers go over a socket pair that only the two hold. A process is the head of a session of its own, so killing it
kills what it forked. It is asked by one task at a time; one whose question was cancelled can only be killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import anyio
import msgspec

from corrente.errors import ConfigError, RewardError
from corrente.score import messages

CHUNK_BYTES = 1 << 18
LAST_WORDS_BYTES = 2000
LINE = 200
"""Characters of a line that are quoted."""
FORGOTTEN_BYTES = 1 << 20
"""What a process without a log may write before it is forgotten."""
LINGER_S = 0.5
"""How long a process may take between closing its line and ending."""
REAP_S = 5.0


class Child:
    """A started process. ``kill`` must be called in the end."""

    def __init__(
        self, process: subprocess.Popen[bytes], link: socket.socket, words: IO[bytes], *, keeps_words: bool
    ) -> None:
        self._process, self._link, self._words, self._keeps_words = process, link, words, keeps_words

    @classmethod
    def spawn(
        cls, role: str, options: dict[str, Any], *, nice: int = 0, threads: int = 0, log: Path | None = None
    ) -> Child:
        """Start a process of ``role``. ``log`` gets what it writes to its standard output and error. Blocks for the
        milliseconds that takes: the process dies with the *thread* that started it, so that thread must be the one that
        runs the event loop."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        birth = messages.Birth(role=role, options=options, socket=theirs.fileno(), parent=os.getpid(), nice=nice)
        command = [sys.executable, "-u", "-P", "-m", "corrente.score.worker", msgspec.json.encode(birth).decode()]
        # A file, so that a chatty process is never stopped by a full pipe.
        words: IO[bytes] = log.open("a+b", buffering=0) if log else TemporaryFile("a+b", buffering=0)  # noqa: SIM115 (closed by kill)
        try:
            with theirs:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=words,
                    env=_environment(threads),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            words.close()
            raise
        return cls(process, ours, words, keeps_words=log is not None)

    async def ready(self, within_s: float, *, name: str) -> None:
        """Wait until it can be asked; however that fails, it is killed. ConfigError, about the scorer ``name``, if it says that
        it never will be, RewardError if it ends or takes longer than ``within_s``."""
        answer: messages.Answer | None = None
        try:
            with anyio.move_on_after(within_s):
                answer = await self._answer()
        finally:
            if not isinstance(answer, messages.Ready):
                self.kill()
        if answer is None:
            raise RewardError(f"{name}: its process was not ready within {within_s:g} s")
        if isinstance(answer, messages.Refused):
            raise ConfigError(f"reward scorer {name}: {answer.message}")

    async def ask(self, question: messages.Question) -> messages.Answer:
        """Its answer. RewardError with how it ended and its last words if it does; TypeError for what cannot be sent."""
        data = memoryview(messages.frame(question))
        if not self._keeps_words and os.fstat(self._words.fileno()).st_size > FORGOTTEN_BYTES:
            os.ftruncate(self._words.fileno(), 0)
        while data:
            await anyio.wait_writable(self._link)
            try:
                data = data[self._link.send(data) :]
            except BlockingIOError:
                continue
            except OSError:
                break  # it ends; waiting for its answer says how
        return await self._answer()

    def kill(self) -> None:
        """End it, and what it forked, at once."""
        self._link.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(REAP_S)
        self._words.close()

    async def _answer(self) -> messages.Answer:
        head = await self._exactly(messages.HEADER.size)
        body = await self._exactly(messages.HEADER.unpack(head)[0])
        return msgspec.msgpack.decode(body, type=messages.Answer)

    async def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            await anyio.wait_readable(self._link)
            try:
                more = self._link.recv(min(count - len(data), CHUNK_BYTES))
            except BlockingIOError:
                continue
            except OSError:
                more = b""
            if not more:
                raise RewardError(await self._obituary())
            data += more
        return bytes(data)

    async def _obituary(self) -> str:
        """How it ended, and the last it said. Its end of the line is closed, so it ends within moments."""
        with anyio.move_on_after(LINGER_S):
            while self._process.poll() is None:
                await anyio.sleep(0.005)
        code = self._process.poll()
        if code is None:
            return "its process closed its line without ending"
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        self._words.seek(max(0, self._words.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
        lines = [line.strip() for line in self._words.read().decode(errors="replace").splitlines() if line.strip()]
        said = " / ".join(line[-LINE:] for line in lines[-3:])
        return f"its process {ending}; {f'last words: {said}' if said else 'it left no word'}"


def _environment(threads: int) -> dict[str, str]:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if threads:
        env |= {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {**env, "OMP_WAIT_POLICY": "passive"}
