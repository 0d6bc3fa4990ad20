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

from corrente.observe.trackers import SampleTable, TrackerRun
from corrente.observe.trl_names import to_trl_names

FOLDER = "tensorboard"
# protobuf creates these classes when the modules are imported, so a type checker does not see them.
events: Any = event_pb2
summaries: Any = summary_pb2
tensors: Any = tensor_pb2
shapes: Any = tensor_shape_pb2
texts: Any = plugin_data_pb2


class TensorboardSink:
    """Implements Sink. A resumed run writes a restart marker, so that TensorBoard discards the points after the checkpoint."""

    def __init__(self, place: TrackerRun) -> None:
        self._writer: Any = EventFileWriter(str(place.folder / FOLDER))
        self._samples = SampleTable()
        if place.steps_done:
            self._write_event(
                place.steps_done + 1, session_log=events.SessionLog(status=events.SessionLog.SessionStatus.START)
            )
        self._write_text("config", 0, "\n".join(f"    {section}: {keys}" for section, keys in place.config.items()))

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        numbers = [
            summaries.Summary.Value(tag=name, simple_value=value) for name, value in to_trl_names(values).items()
        ]
        self._write_event(step, summary=summaries.Summary(value=numbers))
        columns, rows = self._samples.take_rows()
        if rows:
            self._write_text("completions", step, markdown_table(columns, rows))
        self._writer.flush()

    def log_span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        pass

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        self._samples.add_sample(step, sample)

    def log_event(self, level: str, message: str) -> None:
        self._write_text(f"events/{level}", 0, message)

    def close(self) -> None:
        self._writer.close()

    def _write_text(self, tag: str, step: int, text: str) -> None:
        plugin = summaries.SummaryMetadata.PluginData(
            plugin_name="text", content=texts.TextPluginData(version=0).SerializeToString()
        )
        shape = shapes.TensorShapeProto(dim=[shapes.TensorShapeProto.Dim(size=1)])
        tensor = tensors.TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        value = summaries.Summary.Value(
            tag=f"{tag}/text_summary", metadata=summaries.SummaryMetadata(plugin_data=plugin), tensor=tensor
        )
        self._write_event(step, summary=summaries.Summary(value=[value]))

    def _write_event(self, step: int, **what: Any) -> None:
        self._writer.add_event(events.Event(step=step, wall_time=time.time(), **what))


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a Markdown table; line breaks in a cell are shown as a symbol."""

    def cell(value: Any) -> str:
        text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
        return text.replace("|", "\\|").replace("\n", "⏎")

    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)
