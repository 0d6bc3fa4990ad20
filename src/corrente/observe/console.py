"""Show a run on the screen: a live table on a terminal, one plain line per step elsewhere.

It reads no clock; times come with the data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from corrente.observe.summary import format_duration

BARS = "▁▂▃▄▅▆▇█"
REFRESH_S = 0.25
SPARK_WIDTH = 24
PACE_STEPS = 8
AGENT_PREFIX = "reward/agent/"
WAITS = {
    "engine": {"wait/feed_slot_fraction": "a free slot"},
    "learner": {"wait/learner_groups_fraction": "groups", "wait/learner_publish_fraction": "the publish before"},
}
"""For each side, the metrics that give the fraction of time it waited, and the name of the thing it waited for."""


class ConsoleSink:
    """Implements Sink on a rich console. ``steps``: those of the whole run; ``done``: those taken before a resume."""

    def __init__(self, console: Console, *, steps: int, done: int = 0, title: str = "") -> None:
        self._console = console
        self._title = title
        self._view = RunView(steps=steps, done=done)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._started = False
        self._drawn_s = -REFRESH_S

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._view.update(step, values)
        if self._live:
            self._draw_table()
        else:
            self._console.print(self._view.format_line(values), highlight=False, markup=False, soft_wrap=True)

    def log_span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        self._view.elapsed_s = max(self._view.elapsed_s, stop_s)
        if self._live and stop_s - self._drawn_s >= REFRESH_S:
            self._draw_table()

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        pass

    def log_event(self, level: str, message: str) -> None:
        self._console.print(f"{level}: {message}", highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._live and self._started:
            self._live.stop()
            self._started = False

    def _draw_table(self) -> None:
        assert self._live is not None
        if not self._started:
            self._live.start()
            self._started = True
        self._drawn_s = self._view.elapsed_s
        self._live.update(self._view.build_table(self._title), refresh=True)


class RunView:
    """The present state of the run, rendered as a table or as a line; it prints nothing."""

    def __init__(self, *, steps: int, done: int = 0) -> None:
        self.steps = steps
        self.step = done
        self.elapsed_s = 0.0
        self._now: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=SPARK_WIDTH)
        self._held_out: deque[float] = deque(maxlen=SPARK_WIDTH)
        self._first: dict[str, float] = {}
        self._replicas = 1.0
        self._ends_s: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Add one record of metrics."""
        self._now.update(values)
        self._replicas = max(self._replicas, values.get("engine/ready", 0.0))
        for name in ("reward/mean", "eval/reward"):
            if name in values:
                self._first.setdefault(name, values[name])
        if "eval/reward" in values:
            self._held_out.append(values["eval/reward"])
        if is_step_record(values):
            self.step = step
            self.elapsed_s = max(self.elapsed_s, values.get("time/elapsed_s", 0.0))
            self._ends_s.append((step, values.get("time/elapsed_s", 0.0)))
            if "reward/mean" in values:
                self._rewards.append(values["reward/mean"])

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace of the last few steps; None before the second step."""
        if len(self._ends_s) < 2:
            return None
        (step_0, s_0), (step_1, s_1) = self._ends_s[0], self._ends_s[-1]
        return (s_1 - s_0) / max(step_1 - step_0, 1) * max(self.steps - step_1, 0)

    def format_line(self, values: Mapping[str, float]) -> str:
        """Format the record of a step or of an evaluation as one line."""
        if not is_step_record(values):
            return f"  held-out {self._held_out_text()}" if "eval/reward" in values else f"  {_pair_text(values)}"
        eta = "" if self.eta_s is None else f"  left {format_duration(self.eta_s)}"
        width = len(str(self.steps))
        return (
            f"step {self.step:>{width}}/{self.steps}  reward {self._reward_text()}  lag {self._lag_text()}  "
            f"engine {self._side_text('engine')}  learner {self._side_text('learner')}  "
            f"after {format_duration(self.elapsed_s)}{eta}"
        )

    def _reward_text(self) -> str:
        """The mean reward; with several agents, the mean reward of each."""
        agents = {
            name.removeprefix(AGENT_PREFIX): value for name, value in self._now.items() if name.startswith(AGENT_PREFIX)
        }
        return ", ".join(f"{name} {value:.3f}" for name, value in agents.items()) or self._format_number("reward/mean")

    def build_table(self, title: str = "") -> RenderableType:
        """Render the whole state as a table."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        eta = "" if self.eta_s is None else f", {format_duration(self.eta_s)} left"
        grid.add_row("steps", ProgressBar(total=self.steps, completed=self.step, width=40))
        grid.add_row("", f"{self.step} of {self.steps}, {format_duration(self.elapsed_s)}{eta}")
        grid.add_row("reward", self._curve_text("reward/mean", self._rewards))
        if any(name.startswith(AGENT_PREFIX) for name in self._now):
            grid.add_row("agents", self._reward_text())
        if self._held_out:
            grid.add_row("held-out", f"{sparkline(self._held_out)} {self._held_out_text()}")
        grid.add_row("lag", self._lag_text())
        for side in WAITS:
            grid.add_row(side, self._side_text(side))
        grid.add_row("groups", self._count_text("groups", ("trained", "filtered", "failed", "stale", "cancelled")))
        grid.add_row("buffer", self._count_text("buffer", ("generating", "ready", "training")))
        return Group(Text(title, style="bold cyan"), grid) if title else grid

    def _format_number(self, name: str, form: str = ".3f") -> str:
        return format(self._now[name], form) if name in self._now else "-"

    def _curve_text(self, name: str, values: deque[float]) -> str:
        if name not in self._first:
            return "-"
        return f"{sparkline(values)} {self._format_number(name)}   (first {self._first[name]:.3f})"

    def _held_out_text(self) -> str:
        prompts = f", {self._now['eval/episodes']:.0f} episodes" if "eval/episodes" in self._now else ""
        first = f"   (first {self._first['eval/reward']:.3f})"
        return f"{self._format_number('eval/reward')} at version {self._format_number('eval/version', '.0f')}{prompts}{first}"

    def _lag_text(self) -> str:
        if "lag/mean" not in self._now:
            return "-"
        bound = f"bound {self._format_number('lag/bound', '.0f')}" if "lag/bound" in self._now else "no bound"
        return f"{self._format_number('lag/mean', '.2f')} mean, {self._format_number('lag/max', '.0f')} max ({bound})"

    def _side_text(self, side: str) -> str:
        # A side may wait in one place while it works in another; what counts is the waiting that left it idle.
        most = self._now.get(f"{side}/idle_fraction", 0.0)
        parts = {what: min(self._now.get(name, 0.0), most) for name, what in WAITS[side].items()}
        waits = [f"{what} {part:.0%}" for what, part in parts.items() if round(part, 2) > 0]
        idle = self._format_number(f"{side}/idle_fraction", ".0%")
        for_what = f", waits for {', '.join(waits)}" if waits else ""
        pace = f"{self._format_number(f'{side}/tokens_per_s', '.0f')} tokens/s"
        return f"{pace}{self._ready_text() if side == 'engine' else ''}, idle {idle}{for_what}"

    def _ready_text(self) -> str:
        """The number of ready replicas, where there has been more than one or there is none now; else empty."""
        ready = self._now.get("engine/ready", 1.0)
        return f" from {ready:.0f} of {self._replicas:.0f} replicas" if self._replicas > 1 or ready != 1 else ""

    def _count_text(self, area: str, names: tuple[str, ...]) -> str:
        known = [f"{self._now[f'{area}/{name}']:.0f} {name}" for name in names if f"{area}/{name}" in self._now]
        return ", ".join(known) or "-"


def is_step_record(values: Mapping[str, float]) -> bool:
    """True when a record belongs to an optimizer step; other records are evaluations."""
    return "version/learner" in values


def sparkline(values: deque[float]) -> str:
    """Draw the values as a row of bars, scaled between the smallest and the largest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] for v in values)


def _pair_text(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:g}" for name, value in values.items())
