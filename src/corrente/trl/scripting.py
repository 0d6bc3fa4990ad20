"""Methods for training scripts after train(): metrics, state, model and card are written, and an Accelerator is asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from corrente.trl.publish import push, write_card


class OneProcess:
    """The answers of ``trainer.accelerator`` for the one process a script is; the learner is another."""

    is_main_process = is_local_main_process = is_last_process = True
    num_processes = 1
    process_index = local_process_index = 0
    print = staticmethod(print)

    def wait_for_everyone(self) -> None:
        """There is nobody else."""

    def unwrap_model(self, model: Any, *_: Any, **__: Any) -> Any:
        """``model`` itself: it is not wrapped."""
        return model

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"accelerator has no {name}: the learner is another process, started by train()")


class Scripting:
    """The part of a trainer that a script's last lines call."""

    state: Any
    save_model: Callable[[str], None]
    accelerator = OneProcess()
    _output: Path

    def is_world_process_zero(self) -> bool:
        """True: a script is one process."""
        return True

    def is_local_process_zero(self) -> bool:
        """True: a script is one process."""
        return True

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Print ``metrics`` as transformers does, under the name of ``split``."""
        from transformers.trainer_pt_utils import log_metrics

        log_metrics(self, split, dict(metrics))

    def save_metrics(self, split: str, metrics: Mapping[str, float], combined: bool = True) -> None:
        """Write OUTPUT_DIR/SPLIT_results.json and, unless ``combined`` is false, add them to all_results.json."""
        self._output.mkdir(parents=True, exist_ok=True)
        _write(self._output / f"{split}_results.json", metrics)
        if combined:
            everything = self._output / "all_results.json"
            before = json.loads(everything.read_text(encoding="utf-8")) if everything.is_file() else {}
            _write(everything, {**before, **metrics})

    def save_state(self) -> None:
        """Write trainer_state.json into OUTPUT_DIR."""
        self._output.mkdir(parents=True, exist_ok=True)
        self.state.save_to_json(str(self._output / "trainer_state.json"))

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | list[str] | None = None, tags: Any = None
    ) -> None:
        """Write the card of the last run as OUTPUT_DIR/README.md; before the first run there is none."""
        about = {"model_name": model_name, "dataset_name": dataset_name, "tags": tags}
        self._output.mkdir(parents=True, exist_ok=True)
        write_card(self, self._output, model_name or self._output.resolve().name, about)

    def push_to_hub(self, commit_message: str = "End of training", **options: Any) -> str:
        """Upload the present weights, tokenizer and a model card to the Hugging Face hub; see publish.push."""
        return push(self, commit_message=commit_message, **options)


def _write(path: Path, metrics: Mapping[str, float]) -> None:
    path.write_text(json.dumps(metrics, indent=4, sort_keys=True), encoding="utf-8")
