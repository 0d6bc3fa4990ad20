"""The output of a worker, standard output and error: in a log file of bounded size, and the end of it in memory.

The caller reads it from a pipe. A file that cannot be written to (a full disk) costs lines of the log, and not the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from logging import LogRecord, makeLogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path

LOG_BYTES = 10_000_000
LOG_FILES = 3
"""The newest, and the two before it: NAME.log, NAME.log.1, NAME.log.2."""
TAIL_BYTES = 1 << 16
LINES = 3
"""Lines that an error quotes."""
LINE_CHARACTERS = 1000
"""Characters quoted of a line: its last ones."""


class _RotatingFile(RotatingFileHandler):
    """Used as a file that rotates; no logger knows it."""

    def handleError(self, record: LogRecord) -> None:
        """See the module."""


class WorkerLog:
    """``path`` None: only the end is kept, in memory. OSError when the file cannot be opened."""

    def __init__(self, path: Path | None, *, file_bytes: int = LOG_BYTES) -> None:
        self.path = path
        self._tail = bytearray()
        self._line = b""
        self._file: _RotatingFile | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _RotatingFile(
                path, maxBytes=file_bytes, backupCount=LOG_FILES - 1, encoding="utf-8", errors="replace"
            )

    @property
    def tail(self) -> str:
        """The last TAIL_BYTES that were written."""
        return self._tail.decode(errors="replace")

    def write(self, data: bytes) -> None:
        """Take some bytes. Whole lines go to the file; a line longer than TAIL_BYTES goes in pieces."""
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._write_line(line)
        if len(self._line) > TAIL_BYTES:
            self._write_line(self._line)
            self._line = b""

    def close(self) -> None:
        """Write what is left of a line, and close the file."""
        if self._line:
            self._write_line(self._line)
            self._line = b""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _write_line(self, line: bytes) -> None:
        if self._file is not None:
            self._file.handle(makeLogRecord({"msg": line.decode(errors="replace")}))


def describe_output(lines: Sequence[str], log: Path | None) -> str:
    """The end of an error about a worker: the last lines it wrote, and where all of them are."""
    quoted = " / ".join(line.strip()[-LINE_CHARACTERS:] for line in [line for line in lines if line.strip()][-LINES:])
    said = f"last output: {quoted}" if quoted else "it wrote nothing to stderr"
    return said if log is None else f"{said}; see {log}"
