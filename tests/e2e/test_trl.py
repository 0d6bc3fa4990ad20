"""The life of a trainer: again, resumed, stopped, failing, beside an event loop; and what it is given as objects."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from tests.e2e.tiny import answer_fraction, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForSequenceClassification, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from corrente import AsyncGRPOConfig, AsyncGRPOTrainer, GRPOConfig, GRPOTrainer
from corrente.config.load import load_config
from corrente.controller import checkpoint_folder
from corrente.entrypoints import run_folder
from corrente.errors import ConfigError, FailureBudgetError, NothingToLearnError, PipelineError
from corrente.models import cache as model_cache

pytestmark = pytest.mark.slow

ROWS = [{"prompt": text, "answer": "a"} for text in ("abcd", "bcde", "cdef", "dabc", "fgha", "hgfe")]
SMALL = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 6,
    "learning_rate": 0.02,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "logging_strategy": "no",
}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., GRPOTrainer]:
    """A synchronous trainer of the tiny model; further arguments of the config as ``args``."""
    model = write_model(tmp_path / "model", context=256)

    def made(args: dict[str, Any] | None = None, **given: Any) -> GRPOTrainer:
        settings = {**SMALL, "output_dir": str(tmp_path / "out"), "max_steps": 3, **(args or {})}
        given = {"model": str(model), "reward_funcs": answer_fraction, "train_dataset": ROWS, **given}
        return GRPOTrainer(args=GRPOConfig(**settings), **given)

    return made


class Lazy:
    """Rows that are read one by one, as those of a library are."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> dict[str, str]:
        return {"promt" if row else "prompt": "abcd", "answer": "a"}


def weights(trainer: GRPOTrainer) -> torch.Tensor:
    return trainer.model.get_input_embeddings().weight.detach().clone()


def prompts_of(trainer: GRPOTrainer) -> list[str]:
    assert trainer.run_folder is not None
    lines = (trainer.run_folder / "samples.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt_id"] for line in lines]


def test_trainer_that_trains_again_goes_on_with_its_weights(make: Callable[..., GRPOTrainer]):
    trainer = make()
    initial = weights(trainer)
    trainer.train()
    once, folder = weights(trainer), trainer.run_folder
    assert not torch.equal(once, initial)
    assert trainer.state.global_step == 3
    trainer.train()
    assert not torch.equal(weights(trainer), once)
    assert (weights(trainer) - once).abs().max() < (once - initial).abs().max() * 3
    assert trainer.state.global_step == 3
    assert trainer.run_folder != folder


def test_stopped_run_resumes_where_it_was(make: Callable[..., GRPOTrainer], tmp_path: Path):
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = state.global_step == 2
            return control

    settings = {
        "max_steps": -1,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "logging_strategy": "steps",
        "logging_steps": 1,
    }
    more = {**settings, "corrente": {"observe.samples": 4}}
    first = make(more, callbacks=[Stop()])
    first.train()
    assert 2 <= first.state.global_step < 6
    second = make(more)
    second.train(resume_from_checkpoint=True)
    assert second.run_folder == first.run_folder
    assert second.state.global_step == 6
    assert [entry["step"] for entry in second.state.log_history if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    assert sorted(set(prompts_of(second))) == [f"0/{row}" for row in range(6)]
    assert len(prompts_of(second)) == 24
    whole = make({**more, "output_dir": str(tmp_path / "whole")})
    whole.train()
    assert torch.equal(weights(second), weights(whole))


def test_run_resumes_from_the_checkpoint_that_is_named(make: Callable[..., GRPOTrainer], tmp_path: Path):
    first = make({"save_steps": 1})
    first.train()
    again = make({"save_steps": 1})
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert again.state.global_step == 3
    assert torch.equal(weights(again), weights(first))
    with pytest.raises(ConfigError, match="resume_from_checkpoint = 'nowhere'"):
        make().train(resume_from_checkpoint="nowhere")
    with pytest.raises(ConfigError, match="resume_from_checkpoint = True"):
        make({"output_dir": str(tmp_path / "empty")}).train(resume_from_checkpoint=True)


def test_error_of_a_callback_comes_out_of_train(make: Callable[..., GRPOTrainer]):
    class Broken(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyError("diary")

    trainer = make({"max_steps": 50}, callbacks=[Broken])
    with pytest.raises(KeyError, match="diary"):
        trainer.train()
    assert trainer.state.global_step < 50


def test_wish_that_cannot_be_granted_is_told(make: Callable[..., GRPOTrainer]):
    class Wish(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_save = True
            return control

    trainer = make({"save_strategy": "no"}, callbacks=[Wish])
    trainer.train()
    assert trainer.run_folder is not None
    told = (trainer.run_folder / "events.jsonl").read_text()
    assert "control.should_save at step 1" in told


def test_trainer_works_where_an_event_loop_runs(make: Callable[..., GRPOTrainer]):
    async def notebook() -> int:
        trainer = make({"max_steps": 1})
        trainer.train()
        return trainer.state.global_step

    assert anyio.run(notebook) == 1


def test_loaded_model_is_trained_in_place_and_nothing_is_left(make: Callable[..., GRPOTrainer], tmp_path: Path):
    path = write_model(tmp_path / "loaded", context=256)
    model = AutoModelForCausalLM.from_pretrained(path)
    before = model.lm_head.weight.detach().clone()
    trainer = make(model=model, processing_class=AutoTokenizer.from_pretrained(path))
    trainer.train()
    assert trainer.model is model
    assert not torch.equal(model.lm_head.weight, before)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert list((tmp_path / "out" / ".corrente").glob("*/model-1"))
    del trainer
    import gc

    gc.collect()
    assert not (tmp_path / "out" / ".corrente").exists()


def test_reward_model_scores_beside_functions(make: Callable[..., GRPOTrainer], tmp_path: Path):
    path = write_model(tmp_path / "judge", context=256)
    judge = LlamaForSequenceClassification.from_pretrained(path, num_labels=1)
    judge.config.pad_token_id = 1
    trainer = make(
        {"max_steps": 1, "logging_strategy": "steps", "logging_steps": 1, "reward_weights": [1.0, 0.5]},
        reward_funcs=[answer_fraction, judge],
        reward_processing_classes=[None, AutoTokenizer.from_pretrained(path)],
    )
    assert [s.weight for s in trainer.config.reward.scorers] == [0.5]  # pyright: ignore[reportAttributeAccessIssue]
    trainer.train()
    log = trainer.state.log_history[0]
    assert {"rewards/answer_fraction/mean", "rewards/judge/mean"} <= set(log)
    assert log["reward"] == pytest.approx(
        log["rewards/answer_fraction/mean"] + 0.5 * log["rewards/judge/mean"], abs=1e-6
    )


def test_name_of_the_hub_is_found_in_its_cache(
    make: Callable[..., GRPOTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants

    home = tmp_path / "hub" / "models--someone--tiny"
    write_model(home / "snapshots" / "0123abc", context=256)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    trainer = make(model="someone/tiny")
    assert Path(trainer.config.model.path).name == "0123abc"
    with pytest.raises(ConfigError, match="model = 'someone/else': no such directory"):
        make(model="someone/else")


def test_data_end_an_asynchronous_run(tmp_path: Path):
    model = write_model(tmp_path / "model", context=256)
    here = {"runtime.kind": "inline", "runtime.threads": 1}
    settings = {
        **SMALL,
        "output_dir": str(tmp_path / "out"),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 16,
        "corrente": here,
    }
    trainer = AsyncGRPOTrainer(str(model), answer_fraction, AsyncGRPOConfig(**settings), train_dataset=ROWS)
    trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.state.max_steps == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optimizers": (object(), None)}, "optimizers: the optimizer lives in the learner"),
        ({"quantization_config": object()}, "quantization_config"),
        ({"rollout_func": print}, "rollout_func: it generates by itself"),
        ({"model": 3}, "model: of type int"),
        ({"model": "nowhere"}, "model = 'nowhere': no such directory"),
        ({"train_dataset": None}, "train_dataset: give one"),
        ({"reward_funcs": None}, "reward.functions = []"),
        ({"reward_funcs": ["no_such_module:f"]}, "reward_funcs[0] = 'no_such_module:f'"),
        ({"reward_funcs": [answer_fraction, 3]}, "reward_funcs[1]: of type int"),
        ({"callbacks": [print]}, "is no transformers.TrainerCallback"),
        ({"args_": GRPOConfig}, ""),
        ({"train_dataset": [{"text": "ab"}]}, "prompt"),
        ({"train_dataset": [{"prompt": "ab"}]}, "answer_fraction needs 'answer'"),
        (
            {"train_dataset": [*ROWS, {"promt": "ab", "answer": "a"}]},
            f"row {len(ROWS)} of the dataset that was given has no",
        ),
        ({"train_dataset": [*ROWS, {"prompt": ["ab"], "answer": "a"}]}, "it must be text or a list of messages"),
        ({"train_dataset": [*ROWS, "ab"]}, f"row {len(ROWS)} is of type str; it must be a dict"),
        ({"train_dataset": [*ROWS, {"prompt": "ab"}]}, "answer_fraction needs 'answer'"),
    ],
)
def test_wrong_object_is_refused_by_name(make: Callable[..., GRPOTrainer], given: dict[str, Any], words: str):
    if "args_" in given:
        with pytest.raises(ConfigError, match="takes AsyncGRPOConfig"):
            AsyncGRPOTrainer("x", args=GRPOConfig())
        return
    with pytest.raises(ConfigError) as caught:
        make(**given)
    assert words in str(caught.value)


def test_callback_that_waits_for_what_does_not_happen_is_refused(make: Callable[..., GRPOTrainer]):
    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    with pytest.raises(ConfigError, match="Gradients waits for on_pre_optimizer_step"):
        make(callbacks=[Gradients()])
    trainer = make()
    with pytest.raises(ConfigError, match="Gradients"):
        trainer.add_callback(Gradients)

    class Fine(TrainerCallback): ...

    trainer.add_callback(Fine)
    assert isinstance(trainer.pop_callback(Fine), Fine)
    assert trainer.pop_callback(Fine) is None


def test_model_is_pushed_with_the_card_of_its_run(
    make: Callable[..., GRPOTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """There is no hub here: what would be uploaded is looked at, and the error of the upload."""
    from huggingface_hub import constants

    from corrente.errors import FetchError
    from corrente.trl.publish import write_card

    trainer = make({"max_steps": 1, "hub_model_id": "me/tiny"})
    trainer.train()
    write_card(trainer, tmp_path, "me/tiny", {"dataset_name": "letters", "tags": ["small"]})
    card = (tmp_path / "README.md").read_text()
    assert "letters" in card
    assert "- small" in card
    assert "# tiny" in card
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FetchError, match="me/tiny was not uploaded"):
        trainer.push_to_hub()
    with pytest.raises(ConfigError, match="push_to_hub: revision is not taken"):
        trainer.push_to_hub(revision="main")


def test_script_that_is_started_several_times_is_refused(
    make: Callable[..., GRPOTrainer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE = 2: start the script once"):
        make()


def test_environment_may_bring_its_own_data(make: Callable[..., GRPOTrainer], tmp_path: Path):
    from tests.e2e.tool_tasks import CALLS, TEMPLATE, Bell

    more = {"corrente": {"env.calls": CALLS, "chat.template": TEMPLATE}, "max_completion_length": 8}
    given = {"train_dataset": None, "reward_funcs": None, "environment_factory": Bell}
    trainer = make({**more, "max_steps": 1}, **given)
    trainer.train()
    assert trainer.state.global_step == 1
    with pytest.raises(ConfigError, match="max_steps = -1: without a train_dataset"):
        make({**more, "max_steps": -1}, **given)


def test_attribute_that_is_not_there_says_why(make: Callable[..., GRPOTrainer]):
    with pytest.raises(AttributeError, match="compute_loss: write an objective"):
        _ = make().compute_loss
    with pytest.raises(AttributeError, match="accelerator has no backward: the learner is another process"):
        _ = make().accelerator.backward


def test_run_that_is_refused_leaves_no_folder(make: Callable[..., GRPOTrainer], tmp_path: Path):
    trainer = make(train_dataset=Lazy())
    with pytest.raises(ConfigError, match="prompt"):
        trainer.train()
    assert not list(tmp_path.glob("**/runs/*"))


def test_module_that_was_given_stays_what_it_is_under_its_adapters(make: Callable[..., GRPOTrainer], tmp_path: Path):
    """Trained, evaluated, and trained again: each time on the module's own weights, with the adapters so far."""
    peft = pytest.importorskip("peft")
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make(
        {"max_steps": 1}, model=module, peft_config=lora, eval_dataset=ROWS[:2], processing_class=_tokenizer(tmp_path)
    )
    trainer.train()
    once = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items() if "lora_" in name}
    assert trainer.evaluate()["eval_reward"] >= 0
    trainer.train()
    again = {name: tensor for name, tensor in trainer.model.state_dict().items() if "lora_" in name}
    assert any(not torch.equal(tensor, again[name]) for name, tensor in once.items())
    after = dict(module.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    trainer.save_model(str(tmp_path / "saved"))
    settings = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "model")


def _tokenizer(tmp_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(tmp_path / "model")


# ---- going on with a run -------------------------------------------------------------------------------------------------------


def test_refused_resume_leaves_every_checkpoint_where_it_is(make: Callable[..., GRPOTrainer], tmp_path: Path):
    first = make({"save_steps": 1})
    first.train()
    named = str(tmp_path / "out" / "checkpoint-1")
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint: run.seed = 7, but the run in .* another run_name"):
        make({"save_steps": 1, "seed": 7}).train(resume_from_checkpoint=named)
    assert first.run_folder is not None
    with (
        run_folder.held(first.run_folder),
        pytest.raises(ConfigError, match=r"resume_from_checkpoint: the run in .* is still going on"),
    ):
        make({"save_steps": 1}).train(resume_from_checkpoint=named)
    assert len(checkpoint_folder.complete(first.run_folder / "checkpoints")) == 3
    assert not (first.run_folder / "superseded").exists()


def test_run_is_held_while_it_goes_on(make: Callable[..., GRPOTrainer]):
    seen: list[str] = []

    class Resumer(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert trainer.run_folder is not None
            with pytest.raises(ConfigError) as caught, run_folder.held(trainer.run_folder):
                pass
            seen.append(str(caught.value))

    trainer = make({"max_steps": 1}, callbacks=[Resumer])
    trainer.train()
    assert "still going on" in seen[0]


def test_resumed_run_may_take_more_epochs_in_another_precision(make: Callable[..., GRPOTrainer]):
    epochs = {"max_steps": -1, "num_train_epochs": 1, "logging_strategy": "steps", "logging_steps": 1}
    first = make(epochs)
    first.train()
    assert first.state.global_step == 3
    second = make({**epochs, "num_train_epochs": 2, "bf16": True})
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 6
    assert second.run_folder is not None
    assert second.run_folder == first.run_folder
    assert load_config(second.run_folder / run_folder.CONFIG).model.dtype == "bfloat16"
    tokens = [entry["num_tokens"] for entry in second.state.log_history if "num_tokens" in entry]
    assert len(tokens) == 6
    assert tokens == sorted(set(tokens))
    assert tokens[-1] == second.state.num_input_tokens_seen


def test_run_is_not_resumed_with_another_model_or_adapter(make: Callable[..., GRPOTrainer], tmp_path: Path):
    from peft import LoraConfig

    make({"max_steps": 1}).train()
    with pytest.raises(ConfigError, match=r"model.path = .*other.* tensors differ from the run's"):
        make(model=str(write_model(tmp_path / "other", context=256, seed=1))).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=r"model.path = .*max_position_embeddings = 128"):
        make(
            model=AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "short", context=128)),
            processing_class=AutoTokenizer.from_pretrained(tmp_path / "short"),
        ).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=r'adapters = \{kind = "lora"'):
        make(peft_config=LoraConfig(r=2, target_modules=["q_proj"])).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("given", ["path", "tokenizer", "module"])
def test_run_resumes_wherever_its_output_and_its_model_have_been_moved(
    given: str, make: Callable[..., GRPOTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def objects(place: Path) -> dict[str, Any]:
        tokenizer = AutoTokenizer.from_pretrained(place)
        if given == "module":
            return {"model": AutoModelForCausalLM.from_pretrained(place), "processing_class": tokenizer}
        return {"model": str(place), **({"processing_class": tokenizer} if given == "tokenizer" else {})}

    monkeypatch.chdir(tmp_path)
    steady = {"save_steps": 1, "lr_scheduler_type": "constant"}
    make({**steady, "max_steps": 2, "output_dir": "out"}, **objects(tmp_path / "model")).train()
    whole = make({**steady, "output_dir": str(tmp_path / "whole")})
    whole.train()
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "model").rename(tmp_path / "models")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    on = make({**steady, "output_dir": "~/moved"}, **objects(tmp_path / "models"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    on.train(resume_from_checkpoint="~/moved/checkpoint-2")
    assert on.state.global_step == 3
    assert torch.equal(weights(on), weights(whole))
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not (tmp_path / "out").exists()


def test_module_that_was_trained_resumes_its_own_run(make: Callable[..., GRPOTrainer], tmp_path: Path):
    """In the same process its weights are no longer those that the run began with, which the reference policy has."""
    made = {"save_steps": 1, "beta": 0.3, "max_steps": 4}
    whole = make({**made, "output_dir": str(tmp_path / "whole")})
    whole.train()
    trainer = make(made, model=AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
                   processing_class=AutoTokenizer.from_pretrained(tmp_path / "model"))  # fmt: skip
    trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert torch.equal(weights(trainer), weights(whole))


@pytest.mark.parametrize("hard", [True, False])
def test_run_needs_no_symbolic_links(
    hard: bool, make: Callable[..., GRPOTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(95, "Operation not supported")

    for name in ("symlink", *(() if hard else ("link",))):
        monkeypatch.setattr(os, name, refuse)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    made = {"save_steps": 1, "save_total_limit": 2}
    make({**made, "max_steps": 3}, processing_class=tokenizer).train()
    output = tmp_path / "out"
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    AutoModelForCausalLM.from_pretrained(output / "checkpoint-3")
    on = make({**made, "max_steps": 4}, processing_class=tokenizer)
    on.train(resume_from_checkpoint=str(output / "checkpoint-3"))
    assert on.state.global_step == 4


def test_second_run_of_a_trainer_resumes_from_what_it_began_with(make: Callable[..., GRPOTrainer]):
    trainer = make({"save_steps": 1, "run_name": "first"})
    trainer.train()
    trainer.args.run_name = "second"
    trainer.train()
    assert trainer.run_folder is not None
    later = trainer.run_folder / "checkpoints" / "step-000001"
    began, final = trainer.config.model.path, weights(trainer)
    again = make({"save_steps": 1, "run_name": "first"})
    again.train(resume_from_checkpoint=str(later))
    assert again.run_folder == trainer.run_folder
    assert load_config(trainer.run_folder / run_folder.CONFIG).model.path != began
    assert torch.equal(weights(again), final)


# ---- stopping, failing, and what scripts do afterwards -------------------------------------------------------------------------


def test_ctrl_c_stops_with_a_checkpoint_and_comes_out_of_train(
    make: Callable[..., GRPOTrainer], monkeypatch: pytest.MonkeyPatch
):
    class Press(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGINT)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise AssertionError("it did not come to its end")

    trainer = make({"max_steps": 200, "push_to_hub": True}, callbacks=[Press])
    initial = weights(trainer)
    monkeypatch.setattr(trainer, "push_to_hub", lambda: pytest.fail("pushed a run that was stopped"))
    with pytest.raises(KeyboardInterrupt, match="of 200, with a checkpoint"):
        trainer.train()
    assert 2 <= trainer.state.global_step < 200
    assert not torch.equal(weights(trainer), initial)
    on = make({"max_steps": trainer.state.global_step + 1})
    on.train(resume_from_checkpoint=True)
    assert on.state.global_step == trainer.state.global_step + 1


def test_run_that_fails_leaves_no_progress_bar_behind(make: Callable[..., GRPOTrainer]):
    def broken(**_: Any) -> list[float]:
        raise ValueError("no")

    trainer = make({"disable_tqdm": False}, reward_funcs=broken)
    began: list[Any] = []

    class Look(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            began.extend(each.training_bar for each in bars)

    bars = [each for each in trainer.callback_handler.callbacks if isinstance(each, ProgressCallback)]
    trainer.add_callback(Look)
    with pytest.raises(FailureBudgetError, match="no"):
        trainer.train()
    assert [bar.disable for bar in began] == [True]  # closed
    assert [each.training_bar for each in bars] == [None]


def test_warnings_of_a_run_are_logged(make: Callable[..., GRPOTrainer], caplog: pytest.LogCaptureFixture):
    calls: list[int] = []

    def moody(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(calls))
        if calls[-1] == 1:
            raise ValueError("not today")
        return [float(at) for at in range(len(completions))]

    make(reward_funcs=moody).train()
    (told,) = [record for record in caplog.records if record.name == "corrente"]
    assert told.levelname == "WARNING"
    assert "moody: ValueError: not today" in told.getMessage()
    assert f"{__file__}:" in told.getMessage()


def test_data_to_which_no_reward_applies_is_an_error(make: Callable[..., GRPOTrainer]):
    def silent(completions: list[str], **_: Any) -> list[None]:
        return [None] * len(completions)

    with pytest.raises(NothingToLearnError, match="nothing of it was trained on"):
        make({"max_steps": -1, "num_train_epochs": 1}, reward_funcs=silent).train()


def test_evaluation_that_loses_completions_says_so(make: Callable[..., GRPOTrainer]):
    def moody(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
        if "abcd" in prompts:
            raise ValueError("no more")
        return [1.0] * len(completions)

    trainer = make(reward_funcs=moody, eval_dataset=ROWS[:2])
    with pytest.warns(UserWarning, match=r"evaluate: 4 completions were lost; the first: .*no more"):
        assert trainer.evaluate()["eval_lost"] == 4
    with pytest.raises(PipelineError, match=r"evaluate: all 4 completions were lost; the first: .*no more"):
        trainer.evaluate(ROWS[:1])


def test_metric_of_one_of_several_datasets_is_followed(make: Callable[..., GRPOTrainer]):
    settings = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "odd_reward"}
    trainer = make(settings, eval_dataset={"odd": ROWS[:1], "even": ROWS[1:2]})
    trainer.train()
    assert trainer.state.best_metric is not None
    log = next(entry for entry in trainer.state.log_history if "eval_reward" in entry)
    assert {"eval_odd_reward", "eval_even_rewards/answer_fraction/mean", "eval_rewards/answer_fraction/mean"} <= set(
        log
    )


def test_weights_of_the_best_evaluation_are_the_trainers(make: Callable[..., GRPOTrainer], tmp_path: Path):
    """The second evaluation is the best; of four checkpoints it and the newest stay."""
    scores = iter([0.1, 0.9, 0.3, 0.2])

    def scripted(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
        held_out = "dcba" in prompts[0]
        return [next(scores)] if held_out else [float(at) for at in range(len(completions))]

    settings = {
        "max_steps": 4,
        "save_steps": 1,
        "eval_steps": 1,
        "eval_strategy": "steps",
        "num_generations_eval": 1,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
        "learning_rate": 0.01,
    }
    trainer = make(settings, reward_funcs=scripted, eval_dataset=[{"prompt": "dcba"}])
    trainer.train()
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (2, pytest.approx(0.9))
    output = Path(trainer.args.output_dir)
    assert trainer.state.best_model_checkpoint == str(output / "checkpoint-2")
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    kept = AutoModelForCausalLM.from_pretrained(output / "checkpoint-2").state_dict()
    for name, tensor in trainer.model.state_dict().items():
        torch.testing.assert_close(tensor, kept[name])
    last = AutoModelForCausalLM.from_pretrained(output / "checkpoint-4").state_dict()
    assert any(not torch.equal(kept[name], last[name]) for name in kept)


def test_run_that_cannot_start_closes_its_files(make: Callable[..., GRPOTrainer], tmp_path: Path):
    """A caution about dropout is in events.jsonl already when the model is looked for."""
    from peft import LoraConfig

    class Remove(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (tmp_path / "model" / "model.safetensors").unlink()

    lora = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"])
    trainer = make(peft_config=lora, callbacks=[Remove])
    with pytest.raises(ConfigError, match=r"model\.path") as caught:
        trainer.train()
    assert caught.tb  # whose frames hold the files
    opened = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [path for path in opened if path.is_relative_to(tmp_path)]
    assert not list(tmp_path.glob("**/runs/*"))


def test_reward_functions_are_told_updates_where_a_step_makes_several(make: Callable[..., GRPOTrainer]):
    told: list[tuple[int, int]] = []

    def run_watcher(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        told.append((trainer_state.global_step, trainer_state.max_steps))
        return [float(len(text)) for text in completions]

    trainer = make({"max_steps": 4, "num_iterations": 2}, reward_funcs=run_watcher)
    trainer.train()
    assert sorted(set(told)) == [(0, 4), (2, 4)]
    assert trainer.state.global_step == 4


def test_callbacks_get_the_tokenizer_and_the_model_where_it_is_here(make: Callable[..., GRPOTrainer], tmp_path: Path):
    seen: dict[str, Any] = {}

    class Look(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["begin"] = kwargs["model"], kwargs["processing_class"]

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["step"] = kwargs["model"], kwargs["processing_class"]

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["end"] = kwargs["model"], kwargs["processing_class"]

    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "loaded", context=256))
    trainer = make({"max_steps": 1}, model=model, callbacks=[Look])
    trainer.train()
    tokenizer = trainer.processing_class
    assert tokenizer.eos_token == "</s>"
    assert seen == {"begin": (model, tokenizer), "step": (None, tokenizer), "end": (model, tokenizer)}
    began, now = Path(trainer.config.model.path), Path(trainer.put_model())
    assert (now.parent, now.name) == (began.parent, "model-2")  # its weights have changed


def test_tokenizer_of_a_known_name_is_loaded(
    make: Callable[..., GRPOTrainer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):

    write_model(tmp_path / "cache" / "smollm2-135m-instruct", context=256)
    monkeypatch.setattr(model_cache, "cache_dir", lambda: tmp_path / "cache")
    assert make(model="smollm2-135m-instruct").processing_class.eos_token == "</s>"
