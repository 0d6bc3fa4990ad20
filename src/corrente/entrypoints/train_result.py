"""The result of a training run: how it ended, its numbers before and after, and where everything lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from corrente.controller.parts import RunResult
from corrente.entrypoints.run_folder import resume_command
from corrente.observe.summary import SummarySink

ENDINGS = {"steps": "all taken", "data": "no more prompts", "stopped": "stopped"}
"""``ended``, in the words of the summary."""


class TrainResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The result of ``train``; parts of the run before a resume are included. ``print`` shows the summary of `corrente run`."""

    ended: str
    """"steps" (all taken), "data" (no more prompts) or "stopped" (asked to)."""
    steps: int
    """Optimizer steps taken."""
    version: int
    """The version of the weights that are live at the end."""
    samples: int
    """Episodes trained on."""
    elapsed_s: float
    counts: Mapping[str, int]
    """Groups per outcome: trained, filtered, failed, stale, cancelled."""
    metrics: Mapping[str, float]
    """The newest value of each metric of a step; empty when no step was taken."""
    eval_before: Mapping[str, float]
    """The metrics of the first evaluation, under ``eval/``; empty when there was none."""
    eval_after: Mapping[str, float]
    """The metrics of the last evaluation."""
    folder: Path
    """The run's folder."""
    checkpoint: Path | None
    """The checkpoint that was written at the end; its folder ``learner`` is a Hugging Face or peft directory."""
    summary: str

    def __str__(self) -> str:
        return self.summary

    def __repr__(self) -> str:
        parts = [f"{self.steps} steps ({ENDINGS.get(self.ended, self.ended)})", f"{self.samples} samples"]
        if "reward/mean" in self.metrics:
            parts.append(f"reward {self.metrics['reward/mean']:.3f}")
        if "eval/reward" in self.eval_after:
            parts.append(
                f"held-out {self.eval_before.get('eval/reward', float('nan')):.3f} -> "
                f"{self.eval_after['eval/reward']:.3f}"
            )
        return f"<TrainResult: {', '.join(parts)}, in {self.folder}>"


def train_result(result: RunResult, summary: SummarySink, folder: Path) -> TrainResult:
    """The result of a run in ``folder`` whose numbers ``summary`` has seen."""
    ended = ENDINGS.get(result.ended, result.ended)
    lines = [*summary.summary_lines(ended=ended, counts=result.counts), ("folder", str(folder))]
    if result.ended == "stopped":
        lines.append(("to go on", resume_command(folder)))
    return TrainResult(
        ended=result.ended,
        steps=result.steps,
        version=result.version,
        samples=summary.samples,
        elapsed_s=result.elapsed_s,
        counts=result.counts,
        metrics=summary.latest,
        eval_before=summary.first_evaluation,
        eval_after=summary.last_evaluation,
        folder=folder,
        checkpoint=result.checkpoint,
        summary="\n".join(f"{label:14}{text}" for label, text in lines),
    )
