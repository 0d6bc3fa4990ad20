"""A run on the screen: a live table on a terminal, one plain line a step elsewhere. Reads no clock; times come with the data."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from corrente.observe.summary import duration

BARS = "▁▂▃▄▅▆▇█"
REFRESH_S = 0.25
SPARK = 24
RECENT = 8
AGENT = "reward/agent/"
WAITS = {
    "engine": {"wait/feed_slot_fraction": "a free slot"},
    "learner": {"wait/learner_groups_fraction": "groups", "wait/learner_publish_fraction": "the publish before"},
}
"""What each side may wait for, and the metric that says for what part of the time."""


class ConsoleSink:
    """Implements Sink. ``steps`` are those of the whole run, ``done`` those taken before a resume."""

    def __init__(self, console: Console, *, steps: int, done: int = 0, title: str = "") -> None:
        self._console = console
        self._title = title
        self._view = View(steps=steps, done=done)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._started = False
        self._drawn_s = -REFRESH_S

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._view.update(step, values)
        if self._live:
            self._draw()
        else:
            self._console.print(self._view.line(values), highlight=False, markup=False, soft_wrap=True)

    def span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        self._view.elapsed_s = max(self._view.elapsed_s, stop_s)
        if self._live and stop_s - self._drawn_s >= REFRESH_S:
            self._draw()

    def sample(self, step: int, sample: Mapping[str, Any]) -> None:
        pass

    def event(self, level: str, message: str) -> None:
        self._console.print(f"{level}: {message}", highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._live and self._started:
            self._live.stop()
            self._started = False

    def _draw(self) -> None:
        assert self._live is not None
        if not self._started:
            self._live.start()
            self._started = True
        self._drawn_s = self._view.elapsed_s
        self._live.update(self._view.table(self._title), refresh=True)


class View:
    """What is known of the run, as a table or as a line. Does no output."""

    def __init__(self, *, steps: int, done: int = 0) -> None:
        self.steps = steps
        self.step = done
        self.elapsed_s = 0.0
        self._now: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=SPARK)
        self._held_out: deque[float] = deque(maxlen=SPARK)
        self._first: dict[str, float] = {}
        self._replicas = 1.0
        self._ends_s: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Take in one record of metrics."""
        self._now.update(values)
        self._replicas = max(self._replicas, values.get("engine/ready", 0.0))
        for name in ("reward/mean", "eval/reward"):
            if name in values:
                self._first.setdefault(name, values[name])
        if "eval/reward" in values:
            self._held_out.append(values["eval/reward"])
        if is_step(values):
            self.step = step
            self.elapsed_s = max(self.elapsed_s, values.get("time/elapsed_s", 0.0))
            self._ends_s.append((step, values.get("time/elapsed_s", 0.0)))
            if "reward/mean" in values:
                self._rewards.append(values["reward/mean"])

    @property
    def eta_s(self) -> float | None:
        """Time left at the pace of the last few steps; None before there is a pace."""
        if len(self._ends_s) < 2:
            return None
        (step_0, s_0), (step_1, s_1) = self._ends_s[0], self._ends_s[-1]
        return (s_1 - s_0) / max(step_1 - step_0, 1) * max(self.steps - step_1, 0)

    def line(self, values: Mapping[str, float]) -> str:
        """The record as one line: a step, or an evaluation."""
        if not is_step(values):
            return f"  held-out {self._held_out_text()}" if "eval/reward" in values else f"  {_pairs(values)}"
        eta = "" if self.eta_s is None else f"  left {duration(self.eta_s)}"
        width = len(str(self.steps))
        return (
            f"step {self.step:>{width}}/{self.steps}  reward {self._earned()}  lag {self._lag_text()}  "
            f"engine {self._side('engine')}  learner {self._side('learner')}  after {duration(self.elapsed_s)}{eta}"
        )

    def _earned(self) -> str:
        """The mean reward; of several agents, each one's."""
        agents = {name.removeprefix(AGENT): value for name, value in self._now.items() if name.startswith(AGENT)}
        return ", ".join(f"{name} {value:.3f}" for name, value in agents.items()) or self._number("reward/mean")

    def table(self, title: str = "") -> RenderableType:
        """The whole picture."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        eta = "" if self.eta_s is None else f", {duration(self.eta_s)} left"
        grid.add_row("steps", ProgressBar(total=self.steps, completed=self.step, width=40))
        grid.add_row("", f"{self.step} of {self.steps}, {duration(self.elapsed_s)}{eta}")
        grid.add_row("reward", self._curve("reward/mean", self._rewards))
        if any(name.startswith(AGENT) for name in self._now):
            grid.add_row("agents", self._earned())
        if self._held_out:
            grid.add_row("held-out", f"{spark(self._held_out)} {self._held_out_text()}")
        grid.add_row("lag", self._lag_text())
        for side in WAITS:
            grid.add_row(side, self._side(side))
        grid.add_row("groups", self._counts("groups", ("trained", "filtered", "failed", "stale", "cancelled")))
        grid.add_row("buffer", self._counts("buffer", ("generating", "ready", "training")))
        return Group(Text(title, style="bold cyan"), grid) if title else grid

    def _number(self, name: str, form: str = ".3f") -> str:
        return format(self._now[name], form) if name in self._now else "-"

    def _curve(self, name: str, values: deque[float]) -> str:
        if name not in self._first:
            return "-"
        return f"{spark(values)} {self._number(name)}   (first {self._first[name]:.3f})"

    def _held_out_text(self) -> str:
        prompts = f", {self._now['eval/episodes']:.0f} episodes" if "eval/episodes" in self._now else ""
        first = f"   (first {self._first['eval/reward']:.3f})"
        return f"{self._number('eval/reward')} at version {self._number('eval/version', '.0f')}{prompts}{first}"

    def _lag_text(self) -> str:
        if "lag/mean" not in self._now:
            return "-"
        bound = f"bound {self._number('lag/bound', '.0f')}" if "lag/bound" in self._now else "no bound"
        return f"{self._number('lag/mean', '.2f')} mean, {self._number('lag/max', '.0f')} max ({bound})"

    def _side(self, side: str) -> str:
        # A side may wait in one place while it works in another; what counts is the waiting that left it idle.
        most = self._now.get(f"{side}/idle_fraction", 0.0)
        parts = {what: min(self._now.get(name, 0.0), most) for name, what in WAITS[side].items()}
        waits = [f"{what} {part:.0%}" for what, part in parts.items() if round(part, 2) > 0]
        idle = self._number(f"{side}/idle_fraction", ".0%")
        for_what = f", waits for {', '.join(waits)}" if waits else ""
        pace = f"{self._number(f'{side}/tokens_per_s', '.0f')} tokens/s"
        return f"{pace}{self._ready_text() if side == 'engine' else ''}, idle {idle}{for_what}"

    def _ready_text(self) -> str:
        """How many replicas are ready, where there has been more than one, or is none."""
        ready = self._now.get("engine/ready", 1.0)
        return f" from {ready:.0f} of {self._replicas:.0f} replicas" if self._replicas > 1 or ready != 1 else ""

    def _counts(self, area: str, names: tuple[str, ...]) -> str:
        known = [f"{self._now[f'{area}/{name}']:.0f} {name}" for name in names if f"{area}/{name}" in self._now]
        return ", ".join(known) or "-"


def is_step(values: Mapping[str, float]) -> bool:
    """Whether a record is of an optimizer step (others are evaluations)."""
    return "version/learner" in values


def spark(values: deque[float]) -> str:
    """The values as a row of bars between their least and greatest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] for v in values)


def _pairs(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:g}" for name, value in values.items())
