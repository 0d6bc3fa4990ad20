"""Combine several sinks into one. A sink that fails is reported once to the others and not used again; training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from corrente.common.plain_data import plain_text, to_plain
from corrente.observe.base import Sink


class Fanout:
    """Implements Sink over ``sinks``, called in order. ``failed``: the error of each sink that was dropped, by class name."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self.failed: dict[str, str] = {}

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._call_each(lambda sink: sink.log_metrics(step, values))

    def log_span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        self._call_each(lambda sink: sink.log_span(track, name, start_s, stop_s, attrs))

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        values = {plain_text(str(name)): to_plain(value) for name, value in sample.items()}
        self._call_each(lambda sink: sink.log_sample(step, values))

    def log_event(self, level: str, message: str) -> None:
        text = plain_text(message)
        self._call_each(lambda sink: sink.log_event(level, text))

    def close(self) -> None:
        self._call_each(lambda sink: sink.close())

    def _call_each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:
                self._sinks.remove(sink)
                name = getattr(sink, "name", "") or type(sink).__name__
                self.failed[name] = f"{type(error).__name__}: {error}"
                self.log_event("warning", f"{name} failed and is not used any more: {self.failed[name]}")
