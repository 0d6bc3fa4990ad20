"""The Sink protocol: numbers, durations, samples and warnings of a run go to sinks.

The library itself never prints and never configures logging.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """Contract: every call returns at once and may raise.

    After an exception the pipeline reports the failure once, stops using this sink and goes on. Times are seconds on the
    pipeline's clock, which is 0 at the start of the run.

    - ``log_metrics``: the reduced numbers of one optimizer step or evaluation; names are "<area>/<what>[_<unit>]".
    - ``log_span``: ``track`` did ``name`` from ``start_s`` to ``stop_s``.
    - ``log_sample``: one episode as plain data.
    - ``log_event``: one line for the user; ``level`` is "info" or "warning".
    - ``close``: write what is buffered and release files and connections.
    """

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def log_span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None: ...

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None: ...

    def log_event(self, level: str, message: str) -> None: ...

    def close(self) -> None: ...
