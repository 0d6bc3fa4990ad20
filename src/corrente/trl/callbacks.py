"""Callbacks, state and control as transformers has them: its own classes, so that any TrainerCallback finds what it expects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corrente.config import RunConfig
from corrente.errors import ConfigError
from corrente.observe.jsonl import read_metrics
from corrente.trl.translate import Steps, in_steps
from corrente.trl.weights import step_of

UNSUPPORTED_EVENTS = {
    "on_substep_end": "micro-batches are cut by tokens, in the learner's process",
    "on_pre_optimizer_step": "gradients are in the learner's process",
    "on_optimizer_step": "the optimizer is in the learner's process",
    "on_prediction_step": "evaluation generates, many prompts at once",
    "on_predict": "there is no predict()",
}
"""Events that do not happen here, and why."""
STATE = "trainer_state.json"


class Callbacks:
    """The part of a trainer that callbacks see."""

    args: Any
    state: Any
    control: Any
    callback_handler: Any
    processing_class: Any

    def add_callback(self, callback: Any) -> None:
        """Add a TrainerCallback, or a class of one. ConfigError for one that waits for what does not happen here."""
        _check(callback)
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first of a class."""
        self.callback_handler.remove_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first of a class, and return it; None when there is none."""
        return self.callback_handler.pop_callback(callback)

    def log(self, logs: dict[str, float]) -> None:
        """Into state.log_history, and to the callbacks."""
        logs = {**logs, "epoch": self.state.epoch} if self.state.epoch is not None else dict(logs)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._call("on_log", logs=logs)

    def _begin_callbacks(self, callbacks: Sequence[Any], *, model: Any, tokenizer: Any) -> None:
        from transformers.trainer_callback import (
            CallbackHandler,
            DefaultFlowCallback,
            PrinterCallback,
            ProgressCallback,
            TrainerControl,
            TrainerState,
        )

        for callback in callbacks:
            _check(callback)
        if self.args.load_best_model_at_end and self.args.metric_for_best_model is None:
            self.args.metric_for_best_model = "reward"
        wanted = self.args.metric_for_best_model
        if self.args.greater_is_better is None and wanted is not None:  # as TrainingArguments does; callbacks read it
            self.args.greater_is_better = not wanted.endswith("loss")
        shown = PrinterCallback if self.args.disable_tqdm else ProgressCallback
        self.callback_handler = CallbackHandler([DefaultFlowCallback, *callbacks, shown], model, tokenizer, None, None)
        self.state, self.control = TrainerState(), TrainerControl()
        self._call("on_init_end")

    def _begin_state(self, config: RunConfig, steps: Steps, resumed: Path | None) -> None:
        """State as at the beginning of a run; of a resumed one, with its history."""
        from transformers.trainer_callback import TrainerState

        before = resumed.parents[1] / STATE if resumed else None
        self.state = TrainerState.load_from_json(str(before)) if before and before.is_file() else TrainerState()
        state = self.state
        state.global_step = step_of(resumed) * steps.updates if resumed else 0
        state.log_history = [entry for entry in state.log_history if entry["step"] <= state.global_step]
        state.max_steps = steps.total * steps.updates
        state.num_train_epochs = steps.epochs or 1
        state.train_batch_size = self.args.per_device_train_batch_size
        state.logging_steps = (
            in_steps(self.args, "logging_steps", self.args.logging_steps, steps, versions=False) * steps.updates
        )
        state.eval_steps = max(config.eval.every, 1) * steps.per_version * steps.updates
        state.save_steps = config.checkpoint.every * steps.updates or state.max_steps + 1
        state.epoch = state.global_step / steps.updates / steps.per_epoch if steps.per_epoch else 0.0
        if resumed:
            done = read_metrics(resumed.parents[1])
            state.num_input_tokens_seen = int(sum(record.get("samples/tokens", 0) for record in done))
        state.is_hyper_param_search = False

    def _close_bars(self) -> None:
        """Close the bars of transformers' ProgressCallback, which leaves them open where a run does not come to its end."""
        for callback in self.callback_handler.callbacks:
            for name in ("training_bar", "prediction_bar"):
                if (bar := getattr(callback, name, None)) is not None:
                    bar.close()
                    setattr(callback, name, None)

    def _set_handler_model(self, model: Any) -> None:
        """Set what callbacks get as ``model``, and the tokenizer."""
        self.callback_handler.model, self.callback_handler.processing_class = model, self.processing_class

    def _call(self, event: str, **more: Any) -> None:
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control, **more)


def _check(callback: Any) -> None:
    from transformers import TrainerCallback

    cls = callback if isinstance(callback, type) else type(callback)
    if not issubclass(cls, TrainerCallback):
        raise ConfigError(f"callbacks: {cls.__name__} is no transformers.TrainerCallback")
    for event, why in UNSUPPORTED_EVENTS.items():
        if getattr(cls, event) is not getattr(TrainerCallback, event) and not cls.__module__.startswith(
            "transformers."
        ):
            raise ConfigError(f"callbacks: {cls.__name__} waits for {event}, which does not happen here: {why}")
