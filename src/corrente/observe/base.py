"""Where numbers, durations and samples go. The library itself never prints and never configures logging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """Contract: every call returns at once and may raise; the pipeline then records the failure once, stops using this
    sink, and goes on. Times are seconds on the pipeline's clock, 0 at its start.

    - ``metrics``: the numbers of one optimizer step, reduced; names are "<area>/<what>[_<unit>]".
    - ``span``: ``track`` did ``name`` from ``start_s`` to ``stop_s``.
    - ``sample``: one episode as plain data.
    - ``close``: flush.
    """

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None: ...

    def sample(self, step: int, sample: Mapping[str, Any]) -> None: ...

    def event(self, level: str, message: str) -> None: ...

    def close(self) -> None: ...
