"""Parts of the trainers that need no model: what callbacks hear, names of logs, what Ctrl-C does, the folder for objects."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

from corrente import GRPOConfig
from corrente.entrypoints.blocking import run_blocking
from corrente.trl.callbacks import Callbacks
from corrente.trl.logs import LogWindow, evaluated
from corrente.trl.run_watcher import Watcher
from corrente.trl.trainer_inputs import ModelFolder
from corrente.trl.translate import Facts, Steps, count


class Heard(Callbacks):
    """What a watcher sees of a trainer."""

    def __init__(self, callbacks: list[Any], **args: Any) -> None:
        self.args = GRPOConfig(output_dir="x", disable_tqdm=True, **args)
        self._begin_callbacks(callbacks, model=None, tokenizer=None)


def watcher(heard: Heard, steps: Steps, *, stop: anyio.Event | None = None) -> Watcher:
    heard.state.max_steps = steps.total
    return Watcher(heard, steps=steps, stop=stop or anyio.Event(), folder=Path("x"), log_event=lambda _: None)


@pytest.mark.parametrize("larger", [None, True])
@pytest.mark.parametrize(("change", "stopped_at"), [(0.1, None), (-0.1, 3)])
def test_early_stopping_counts_what_is_no_better_than_the_best_before(
    larger: bool | None, change: float, stopped_at: int | None
):
    heard = Heard(
        [EarlyStoppingCallback(early_stopping_patience=2)],
        eval_strategy="steps",
        metric_for_best_model="reward",
        greater_is_better=larger,
    )
    stop = anyio.Event()
    watch = watcher(heard, Steps(groups=1, updates=1, per_version=1, total=9, epochs=0, per_epoch=0), stop=stop)
    ended = None
    for step in range(1, 6):
        heard.state.global_step = step
        watch.log_metrics(step, {"eval/episodes": 4.0, "eval/reward": 1.0 + change * step})
        if stop.is_set() and ended is None:
            ended = step
    assert watch.error is None
    assert ended == stopped_at
    assert watch.stopped == (stopped_at is not None)
    assert heard.state.best_global_step == (5 if change > 0 else 1)


def test_metric_whose_name_ends_in_loss_is_better_when_smaller():
    assert Heard([], metric_for_best_model="loss").args.greater_is_better is False
    assert Heard([]).args.greater_is_better is None


@pytest.mark.parametrize(
    ("args", "ends"),
    [
        ({"num_train_epochs": 2, "per_device_train_batch_size": 16}, [3, 5]),
        ({"max_steps": 4, "per_device_train_batch_size": 16}, [3, 4]),
    ],
)
def test_epoch_ends_with_the_last_step(args: dict[str, Any], ends: list[int]):
    heard: list[int] = []

    class Epochs(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            heard.append(state.global_step)

    trainer = Heard([Epochs()], logging_strategy="epoch", **args)
    steps = count(trainer.args, Facts(model="m", rows=5))
    watch = watcher(trainer, steps)
    trainer.state.logging_steps, trainer.state.eval_steps, trainer.state.save_steps = 1, 1, 500
    for step in range(1, steps.total + 1):
        watch.log_metrics(step, {"train/loss": 0.1})
    assert watch.error is None
    assert heard == ends
    assert [entry["step"] for entry in trainer.state.log_history] == ends


def test_logs_of_several_datasets_are_named_as_by_transformers():
    ours = {
        "eval/reward": 1.0,
        "eval/reward/short": 2.0,
        "eval/tokens_mean": 3.0,
        "eval/math/reward": 4.0,
        "eval/math/reward/short": 5.0,
        "eval/math/tokens_mean": 6.0,
        "eval/math/pass@1": 7.0,
    }
    assert evaluated(ours) == {
        "eval_reward": 1.0,
        "eval_rewards/short/mean": 2.0,
        "eval_completions/mean_length": 3.0,
        "eval_math_reward": 4.0,
        "eval_math_rewards/short/mean": 5.0,
        "eval_math_completions/mean_length": 6.0,
        "eval_math_pass@1": 7.0,
    }


def test_tokens_are_counted_on_from_what_was_seen():
    window = LogWindow(tokens=100)
    window.add({"samples/tokens": 7.0})
    assert window.flush()["num_tokens"] == 107


# ---- Ctrl-C beside an event loop -----------------------------------------------------------------------------------------------


def _press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_beside_an_event_loop_asks_the_run_to_stop():
    stop, ended = anyio.Event(), list[str]()

    async def work(signals: bool) -> str:
        _press()
        await stop.wait()
        ended.append("with a checkpoint")
        return "stopped"

    async def notebook() -> str:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return run_blocking(work, stop=stop)

    assert asyncio.run(notebook()) == "stopped"
    assert ended


@pytest.mark.parametrize("first", [True, False])
def test_ctrl_c_again_or_without_a_stop_ends_the_work_before_it_is_raised(first: bool):
    stop, ended = anyio.Event(), list[str]()

    async def work(signals: bool) -> None:
        try:
            if first:
                _press()
                await stop.wait()
            _press()
            await anyio.sleep_forever()
        finally:
            ended.append("cleaned up")

    async def notebook() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            run_blocking(work, stop=stop if first else None)
        assert ended == ["cleaned up"]

    asyncio.run(notebook())


def test_error_comes_out_of_the_thread_beside_an_event_loop():
    async def work(signals: bool) -> None:
        assert not signals
        raise KeyError("diary")

    async def notebook() -> None:
        with pytest.raises(KeyError, match="diary"):
            run_blocking(work)

    asyncio.run(notebook())


# ---- the folder for objects ----------------------------------------------------------------------------------------------------


class Saved(SimpleNamespace):
    """A model, or tokenizer, of one file."""

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / f"{self.name}.json").write_text("{}")


def put(model_folder: ModelFolder) -> Path:
    return Path(model_folder.reward(0, Saved(name="model"), Saved(name="tokenizer")))


def test_trainers_of_one_folder_have_and_remove_their_own(tmp_path: Path):
    first, second = ModelFolder(tmp_path), ModelFolder(tmp_path)
    one, two = put(first), put(second)
    assert one != two
    first.remove()
    assert not one.exists()
    assert (two / "model.json").is_file()
    second.remove()
    second.remove()
    assert not list(tmp_path.iterdir())


def test_folder_of_a_trainer_that_was_killed_is_removed_by_the_next(tmp_path: Path):
    left = tmp_path / ".corrente" / "killed"
    (left / "model").mkdir(parents=True)
    first, second = ModelFolder(tmp_path), ModelFolder(tmp_path)
    alive = put(first)
    assert not left.exists()
    put(second)
    assert alive.is_dir()
    first.remove()
    second.remove()
