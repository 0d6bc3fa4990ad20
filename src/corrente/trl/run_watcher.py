"""The sink that leads a run's events to transformers' callbacks, and their wishes back to the run.

    metrics of a step       on_step_end, on_epoch_end, on_log, on_epoch_begin, on_step_begin of the next
    metrics of evaluation   on_evaluate
    a checkpoint            on_save, with OUTPUT_DIR/checkpoint-N leading to it

Callbacks are called on the controller's event loop, one after another, with the real args, state and control; engine and learner
go on meanwhile. A callback that raises ends the run at the next version, and train() raises what it raised. The callback handler
is transformers' own, and so are the decisions of its DefaultFlowCallback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio

from corrente.controller.checkpointer import CHECKPOINT_ATTR
from corrente.data.checkpoint_names import CHECKPOINTS, LEARNER, step_of_checkpoint
from corrente.errors import ConfigError
from corrente.trl.checkpoint_links import link_checkpoint
from corrente.trl.logs import LogWindow, evaluated
from corrente.trl.translate import Steps

logger = logging.getLogger("corrente")


class Watcher:
    """Implements Sink. ``error`` is what a callback raised; ``stopped``: one asked for the end of the run."""

    def __init__(
        self, trainer: Any, *, steps: Steps, stop: anyio.Event, folder: Path, log_event: Callable[[str], None]
    ) -> None:
        self._trainer, self._steps, self._stop, self._folder = trainer, steps, stop, folder
        self._window = LogWindow(tokens=trainer.state.num_input_tokens_seen)
        self._losses: list[float] = []
        self.error: BaseException | None = None
        self.stopped = False
        self._log_event = log_event
        self._reported: set[str] = set()
        self._saved_at = -1

    # ---- what a Sink does ----------------------------------------------------------------------------------------------------

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        if "eval/episodes" in values:
            self._call_safely(lambda: self._evaluated(step, values))
        elif "train/loss" in values:
            self._call_safely(lambda: self._stepped(step, values))

    def log_span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        if written := attrs.get(CHECKPOINT_ATTR):
            self._call_safely(lambda: self._saved(str(written)))

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        pass

    def log_event(self, level: str, message: str) -> None:
        """Warnings are logged, which shows them unless a script says otherwise; events.jsonl has everything."""
        if level == "warning":
            logger.warning(message)

    def close(self) -> None:
        pass

    @property
    def mean_loss(self) -> float:
        """Over all steps of this run."""
        return sum(self._losses) / len(self._losses) if self._losses else 0.0

    # ---- what callbacks hear -------------------------------------------------------------------------------------------------

    def _stepped(self, step: int, values: Mapping[str, float]) -> None:
        t, state = self._trainer, self._trainer.state
        state.global_step = step * self._steps.updates
        state.epoch = step / self._steps.per_epoch if self._steps.per_epoch else 0.0
        state.num_input_tokens_seen += int(values.get("samples/tokens", 0))
        self._losses.append(values["train/loss"])
        self._window.add(values)
        self._call("on_step_end")
        self._report_unplanned()
        last = step == self._steps.total
        ends = last or (bool(self._steps.per_epoch) and step % self._steps.per_epoch == 0)
        if ends:
            self._call("on_epoch_end")
        if t.control.should_log:
            self.log(self._window.flush())
        if ends and not last:
            self._call("on_epoch_begin")
        if not last:
            self._call("on_step_begin")
        self._apply_control()

    def _evaluated(self, step: int, values: Mapping[str, float]) -> None:
        logs = evaluated(values)
        self.log(logs, at=step)
        self._call("on_evaluate", metrics=logs)  # which compares with the best of the evaluations before
        self._note_best(logs, step)
        self._apply_control()

    def _saved(self, name: str) -> None:
        step = step_of_checkpoint(name)
        assert step is not None, name
        if step == self._saved_at:  # the end of a run finds its last checkpoint written
            return
        self._saved_at = step
        target = self._folder / CHECKPOINTS / name / LEARNER
        output = self._folder.parents[1]
        link_checkpoint(output / f"checkpoint-{step * self._steps.updates}", target)
        self._trainer.state.save_to_json(str(self._folder / "trainer_state.json"))
        self._call("on_save")
        self._apply_control()

    def _note_best(self, logs: Mapping[str, float], step: int) -> None:
        """state.best_metric and best_global_step, as transformers keeps them."""
        t, state = self._trainer, self._trainer.state
        wanted = t.args.metric_for_best_model
        if wanted is None:
            return
        name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
        if name not in logs:
            raise ConfigError(f"metric_for_best_model = {wanted!r}: evaluation has {', '.join(sorted(logs))}")
        larger = t.args.greater_is_better
        if state.best_metric is None or (logs[name] > state.best_metric if larger else logs[name] < state.best_metric):
            state.best_metric, state.best_global_step = logs[name], step * self._steps.updates

    def _report_unplanned(self) -> None:
        """Checkpoints and evaluations are planned before a run; what a callback asks for besides is not done, and told."""
        control, state = self._trainer.control, self._trainer.state
        planned = {"should_save": state.save_steps, "should_evaluate": state.eval_steps}
        for flag, every in planned.items():
            last = state.global_step >= state.max_steps
            if getattr(control, flag) and not last and state.global_step % every and flag not in self._reported:
                self._reported.add(flag)
                key = flag.removeprefix("should_")
                told = f"a callback set control.{flag} at step {state.global_step}, which {key}_steps does not plan: not done"
                self._log_event(told)
                self.log_event("warning", told)

    def log(self, logs: dict[str, Any], at: int | None = None) -> None:
        """Into state.log_history, and to the callbacks."""
        state = self._trainer.state
        if state.epoch is not None:
            behind = 0.0 if at is None or not self._steps.per_epoch else at / self._steps.per_epoch - state.epoch
            logs = {**logs, "epoch": state.epoch + behind}
        step = state.global_step if at is None else at * self._steps.updates
        state.log_history.append({**logs, "step": step})
        self._call("on_log", logs=logs)

    def _call(self, event: str, **more: Any) -> None:
        t = self._trainer
        t.control = getattr(t.callback_handler, event)(t.args, t.state, t.control, **more)

    def _apply_control(self) -> None:
        if (
            self._trainer.control.should_training_stop
            and self._trainer.state.global_step < self._trainer.state.max_steps
        ):
            self.stopped = True
            self._stop.set()

    def _call_safely(self, call: Callable[[], None]) -> None:
        """Make a call, unless one before it raised: after an error callbacks are not called any more."""
        if self.error is not None:
            return
        try:
            call()
        except Exception as error:  # whatever the user's callback does; train() raises it
            self.error = error
            self._stop.set()
