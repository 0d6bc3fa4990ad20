"""Answers of the planner as text: a table of variants, the memory of a device, and a config that runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from corrente.plan.predict import Prediction
from corrente.plan.setting import Setting


def prediction_table(setting: Setting, made: Sequence[Prediction]) -> Table:
    """A row for each prediction: seconds, samples and tokens a second, who is busy, ages, device hours and cost."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    names = ["devices", "tp", "s/step", "samples/s", "tokens/s", "engines", "learner", "age", "hours"]
    for name in [*names, *(["cost"] if setting.price else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for prediction in made:
        split = prediction.split
        cells = [
            split.label,
            str(split.generating) if split.colocated else f"{split.generating} : {split.training}",
            str(split.tensor_parallel),
            f"{prediction.step_s:,.1f}",
            f"{prediction.samples_per_s:,.2f}",
            f"{prediction.tokens_per_s:,.0f}",
            f"{prediction.engine_busy:.0%}",
            f"{prediction.learner_busy:.0%}",
            f"{prediction.lag_mean:.2f} / {prediction.lag_max:.0f}",
            f"{prediction.device_hours:,.0f}",
        ]
        if setting.price:
            cells.append(f"{prediction.cost:,.0f}")
        table.add_row(*cells)
    return table


def memory_lines(setting: Setting, prediction: Prediction) -> list[str]:
    """What fits on a device, and by how much."""
    memory, split = prediction.memory, prediction.split
    gb = 1e9
    engine = (
        f"an engine's device: {memory.engine / gb:,.0f} of {memory.capacity / gb:,.0f} GB, "
        f"{min(memory.sequences, setting.max_sequences)} sequences at once"
    )
    room = (memory.capacity - memory.learner) / gb
    fits = (
        f"{room:,.0f} GB to spare"
        if room >= 0
        else f"{-room:,.0f} GB too much: train on more devices, or shard further"
    )
    learner = f"a learner's device: {memory.learner / gb:,.0f} of {memory.capacity / gb:,.0f} GB, {fits}"
    return [engine, learner] if not split.colocated else [engine, f"{learner}, while engines sleep"]


def answer(
    setting: Setting, made: Sequence[Prediction], *, of_steps: int, reasons: Sequence[str] = ()
) -> RenderableType:
    """The whole answer: what was asked, the table, who waits for whom, memory, and reasons."""
    best = max(made, key=lambda prediction: prediction.samples_per_s)
    model = setting.model
    active = f", {model.active_parameters / 1e9:.1f}B active" if model.experts else ""
    lengths = setting.lengths
    heading = (
        f"{model.name} ({model.parameters / 1e9:.2f}B parameters{active}) on {setting.devices} x {setting.device.name}, "
        f"{setting.prompts} prompts x {setting.group}, completions of {lengths.mean:,.0f} tokens"
        + (f", at most {lengths.maximum:,}" if lengths.maximum else "")
    )
    legend = (
        "devices: engines : learner. engines, learner: the part of the time they are busy. age: of trained tokens in versions, "
        f"mean / largest. hours{' and cost' if setting.price else ''}: device hours of {of_steps:,} steps."
    )
    lines = [Text(heading, style="bold"), Text()]
    below = [Text(f"{prediction.split.label}: {prediction.waiting}") for prediction in made]
    memory = [Text(f"{best.split.label}, {line}") for line in memory_lines(setting, best)]
    why = [Text(f"why: {reason}") for reason in reasons]
    return Group(
        *lines, prediction_table(setting, made), Text(legend, style="dim"), Text(), *below, Text(), *memory, *why
    )


def answer_text(renderable: RenderableType, *, width: int = 160) -> str:
    """The answer as plain text."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def config_text(setting: Setting, prediction: Prediction, *, model: str) -> str:
    """A config for the planned run, as TOML. Prompts and rewards are the reader's to name."""
    split = prediction.split
    lines = [
        f"# Planned for {setting.devices} x {setting.device.name}: {prediction.step_s:,.0f} s a step, {prediction.waiting}.",
        "[run]",
        f"prompts_per_step = {setting.prompts}",
        f"group_size = {setting.group}",
        "",
        "[model]",
        f"path = {_quoted(model)}",
        "",
        "[sampling]",
        f"max_tokens = {setting.lengths.maximum or round(4 * setting.lengths.mean)}",
        "",
        "[staleness]",
        f"max = {split.ahead}" if split.ahead else "# synchronous: buffer.kind is none",
        "",
    ]
    if not split.ahead:
        lines += ["[buffer]", 'kind = "none"', ""]
    held = min(setting.max_sequences, prediction.memory.sequences)
    if setting.device.name == "CPU":
        lines += ["[engine]", 'kind = "embedded"', f"max_sequences = {held}", ""]
    else:
        lines += ["[engine]", 'kind = "vllm"', f"max_sequences = {held}"]
        if split.tensor_parallel > 1:
            lines.append(f'args = ["--tensor-parallel-size", "{split.tensor_parallel}"]')
        lines.append("")
    lines += ["[pool]", f"replicas = {split.replicas}", ""]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
