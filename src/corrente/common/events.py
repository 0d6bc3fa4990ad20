"""The function by which a part reports an event of the run, whoever writes it down."""

from __future__ import annotations

from collections.abc import Callable

LogEvent = Callable[[str, str], None]
"""Reports an event: a level ("info" or "warning") and one line of text. See observe.base.Sink.log_event."""


def ignore_event(level: str, message: str) -> None:
    """A ``LogEvent`` that drops the event."""
