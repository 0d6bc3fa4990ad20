# pyright: basic
# The library has no types that strict checking could use.
"""TensorBoard event files, written with TensorBoard's own classes; torch is not needed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
from tensorboard.plugins.text import plugin_data_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from corrente.observe.names import named
from corrente.observe.trackers import Samples, TrackerPlace

FOLDER = "tensorboard"
# Their classes are made when the modules are imported, so that no type checker sees them.
events: Any = event_pb2
summaries: Any = summary_pb2
tensors: Any = tensor_pb2
shapes: Any = tensor_shape_pb2
texts: Any = plugin_data_pb2


class TensorboardSink:
    """Implements Sink. What a run that is resumed had written past its checkpoint is marked as void, as TensorBoard does it."""

    def __init__(self, place: TrackerPlace) -> None:
        self._writer: Any = EventFileWriter(str(place.folder / FOLDER))
        self._samples = Samples()
        if place.done:
            self._write(place.done + 1, session_log=events.SessionLog(status=events.SessionLog.SessionStatus.START))
        self._text("config", 0, "\n".join(f"    {section}: {keys}" for section, keys in place.config.items()))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        numbers = [summaries.Summary.Value(tag=name, simple_value=value) for name, value in named(values).items()]
        self._write(step, summary=summaries.Summary(value=numbers))
        columns, rows = self._samples.take()
        if rows:
            self._text("completions", step, table(columns, rows))
        self._writer.flush()

    def span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        pass

    def sample(self, step: int, sample: Mapping[str, Any]) -> None:
        self._samples.add(step, sample)

    def event(self, level: str, message: str) -> None:
        self._text(f"events/{level}", 0, message)

    def close(self) -> None:
        self._writer.close()

    def _text(self, tag: str, step: int, text: str) -> None:
        plugin = summaries.SummaryMetadata.PluginData(
            plugin_name="text", content=texts.TextPluginData(version=0).SerializeToString()
        )
        shape = shapes.TensorShapeProto(dim=[shapes.TensorShapeProto.Dim(size=1)])
        tensor = tensors.TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        value = summaries.Summary.Value(
            tag=f"{tag}/text_summary", metadata=summaries.SummaryMetadata(plugin_data=plugin), tensor=tensor
        )
        self._write(step, summary=summaries.Summary(value=[value]))

    def _write(self, step: int, **what: Any) -> None:
        self._writer.add_event(events.Event(step=step, wall_time=time.time(), **what))


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; line ends in a cell are shown as such."""

    def cell(value: Any) -> str:
        text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
        return text.replace("|", "\\|").replace("\n", "⏎")

    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)
