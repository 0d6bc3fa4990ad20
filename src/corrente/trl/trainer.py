"""AsyncGRPOTrainer and GRPOTrainer: TRL's constructor and methods over a run of corrente.

    constructor     arguments to a RunConfig and what is brought as objects, all checked; no weights are loaded by it
    train()         a run in OUTPUT_DIR/runs, with callbacks; weights of its last checkpoint are the trainer's then
    train() again   goes on with the trained weights, as TRL does: state, schedule and optimizer begin anew
    train(resume_from_checkpoint=True)     goes on with the newest run from its newest checkpoint, or from the one that is named

Where an event loop runs already, as in a notebook, the run has a thread of its own.
"""

from __future__ import annotations

import shutil
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import anyio
import msgspec

from corrente.config import Full, RunConfig
from corrente.config.paths import expand_home
from corrente.controller.parts import RunResult
from corrente.data.checkpoint_names import LEARNER
from corrente.entrypoints import run_folder
from corrente.entrypoints.blocking import run_blocking
from corrente.entrypoints.checks import check_config
from corrente.entrypoints.evaluate import run_evaluation
from corrente.entrypoints.inputs import RunInputs
from corrente.entrypoints.run_folder import run_folder_path
from corrente.entrypoints.train import run_training
from corrente.errors import ConfigError, Interrupted, PipelineError
from corrente.models import cache as model_cache
from corrente.models.limits import model_type
from corrente.observe.base import Sink
from corrente.observe.fanout import Fanout
from corrente.observe.jsonl import JsonlSink
from corrente.observe.trackers import open_trackers
from corrente.trl import resuming, trainer_inputs, weights
from corrente.trl.best_checkpoint import choose_best
from corrente.trl.callbacks import Callbacks
from corrente.trl.config import Arguments, AsyncGRPOConfig, GRPOConfig
from corrente.trl.constructor import check_machine, refuse_objects
from corrente.trl.logs import evaluated
from corrente.trl.model_arguments import download_arguments, trusts_code
from corrente.trl.run_watcher import Watcher
from corrente.trl.scripting import Scripting
from corrente.trl.translate import Facts, count, translate, with_argument_names
from corrente.trl.weights import step_of

NOT_OURS = {
    "get_train_dataloader": "prompts are drawn as slots come free; see docs/how-to/datasets.md",
    "create_optimizer": "see the section learner of the configuration",
    "compute_loss": "write an objective: docs/how-to/write-an-implementation.md",
    "predict": "evaluate() generates and scores",
}


class Trainer(Callbacks, Scripting):
    """The methods of both trainers; see the module."""

    config_class: ClassVar[type[Any]]
    suffix: ClassVar[str]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        env: Any = None,
    ) -> None:
        if not isinstance(callbacks or (), Sequence):
            raise ConfigError(f"callbacks: {callbacks!r} given; it must be a list of callbacks")
        refuse_objects(optimizers=optimizers, quantization_config=quantization_config, rollout_func=rollout_func)
        trainer_inputs.check_model(model)
        self.args = self._arguments(args, model)
        check_machine()
        if train_dataset is None and environment_factory is not None and not isinstance(environment_factory, dict):
            train_dataset = trainer_inputs.placeholders(self.args)
        self._output = Path(expand_home(str(self.args.output_dir or "trainer_output"))).absolute()
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._given_model, self._given_class = model, processing_class
        self._model_folder = trainer_inputs.ModelFolder(self._output, trust_remote_code=trusts_code(self.args))
        weakref.finalize(self, self._model_folder.remove)
        self._rewards = trainer_inputs.rewards(
            reward_funcs, reward_processing_classes, self.args.reward_weights, self._model_folder
        )
        self.reward_funcs = list(self._rewards.functions)
        self._inputs = RunInputs(
            reward_functions=self._rewards.functions,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            tools=tuple(tools or ()),
            environment_factory=environment_factory,
            env=env,
        )
        self._trained: Path | None = None
        self._loaded: Any = None
        self._tokenizer: Any = processing_class
        self._folder: Path | None = None
        path = self.put_model()
        family = model_type(model_cache.cached_model(path) or Path(path))
        adapters = trainer_inputs.adapters(peft_config, model_type=family)
        self._tables = {**self._rewards.tables(), **adapters, **self._env_tables()}
        self._config = self._resolve(self._model_path)
        self._begin_callbacks(callbacks or (), model=self._present_model, tokenizer=processing_class)

    # ---- methods of transformers' Trainer ------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Any:
        """Run to the end of max_steps or num_train_epochs. Returns transformers' TrainOutput.

        Raises PipelineError when the run cannot go on, whatever a callback raised, and KeyboardInterrupt for Ctrl-C or SIGTERM:
        after the first, with a checkpoint of the version that was trained last, whose weights are then the trainer's; after the
        second, at once.
        """
        config, start = self._run_to_start(resume_from_checkpoint)
        folder = run_folder_path(config)
        with resuming.held(folder, config, start=start):
            self._folder = folder
            try:
                return self._train(config, folder, start)
            finally:
                self._close_bars()

    def _train(self, config: RunConfig, folder: Path, start: Path | None) -> Any:
        from transformers.trainer_utils import TrainOutput

        began_s, steps = time.monotonic(), count(self.args, self._facts(config.model.path))
        self._begin_state(config, steps, start)
        stop = anyio.Event()
        record = JsonlSink(folder, timeline=config.observe.timeline)
        watcher = Watcher(
            self, steps=steps, stop=stop, folder=folder, log_event=lambda text: record.log_event("warning", text)
        )
        outcome = self._run(config, watcher, record, start=start, stop=stop)
        self._take_weights(outcome)
        if watcher.error is not None:
            raise watcher.error
        if outcome.ended == "stopped" and not watcher.stopped:
            raise KeyboardInterrupt(
                f"stopped after step {self.state.global_step} of {self.state.max_steps}, with a checkpoint; "
                "train(resume_from_checkpoint=True) goes on"
            )
        metrics = self._summary(outcome, watcher, time.monotonic() - began_s, config)
        self._call("on_train_end")
        if self.args.push_to_hub:
            self.push_to_hub()
        return TrainOutput(self.state.global_step, watcher.mean_loss, metrics)

    def _run(
        self, config: RunConfig, watcher: Watcher, record: Sink, *, start: Path | None, stop: anyio.Event
    ) -> RunResult:
        """The run itself. Its sinks are closed, however it ends."""
        folder, sinks = run_folder_path(config), [record]
        try:
            self._set_handler_model(self._present_model)
            self._call("on_train_begin")
            self._call("on_epoch_begin")
            self._call("on_step_begin")
            sinks += [*open_trackers(config, folder, done=step_of(start) if start else 0), watcher]
            self._set_handler_model(None)  # the learner has it
            return run_blocking(
                lambda signals: run_training(
                    config, sinks=sinks, resume=start is not None, inputs=self._inputs, signals=signals, stop=stop
                ),
                stop=stop,
            )
        except BaseException as error:
            Fanout(sinks).close()
            if isinstance(error, ConfigError) and start is None and not self.state.global_step:
                shutil.rmtree(folder, ignore_errors=True)  # nothing was trained: nothing is left
            if isinstance(error, Interrupted):
                raise KeyboardInterrupt(str(error)) from error
            raise

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Generate and score held-out prompts with the present weights; returns metrics that begin with the prefix.

        Completions that were lost are in no mean; a warning says how many, and what of. PipelineError when all were.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ConfigError("evaluate: there is no eval_dataset; give one here, or to the trainer")
        inputs = msgspec.structs.replace(self._inputs, eval_dataset=dataset)
        rows = trainer_inputs.rows(dataset) or self._config.eval.prompts
        self.put_model()
        config = msgspec.structs.replace(self._config, eval=msgspec.structs.replace(self._config.eval, prompts=rows))
        config = self._with_weights(config, self._trained)
        step, steps = self.state.global_step, count(self.args, self._facts(config.model.path))
        version = step // (steps.updates * steps.per_version)
        found = run_blocking(lambda _: run_evaluation(config, inputs=inputs, step=step, version=version))
        if lost := int(found.metrics["eval/lost"]):
            told = f"{lost} completions were lost; the first: {found.error}"
            if not found.metrics["eval/episodes"]:
                raise PipelineError(f"evaluate: all {told}")
            warnings.warn(f"evaluate: {told}", stacklevel=2)
        logs = {f"{metric_key_prefix}{n.removeprefix('eval')}": v for n, v in evaluated(found.metrics).items()}
        self.log(logs)
        self._call("on_evaluate", metrics=logs)
        return logs

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the present weights and their tokenizer as a Hugging Face, or peft, directory; OUTPUT_DIR if none is named."""
        target = Path(expand_home(output_dir)) if output_dir else self._output
        target.mkdir(parents=True, exist_ok=True)
        weights.copy_model(self._weights(), target, self._given_model)

    @property
    def config(self) -> RunConfig:
        """The RunConfig that the arguments come to."""
        return self._config

    @property
    def run_folder(self) -> Path | None:
        """The folder that the last train() wrote to; None before the first."""
        return self._folder

    @property
    def model(self) -> Any:
        """The model with the present weights: the one that was given, or one that is loaded when it is first asked for."""
        if self._loaded is None:
            self._loaded = self._load_model()
        return self._loaded

    @property
    def processing_class(self) -> Any:
        """The tokenizer: the one that was given, or that of the model."""
        if self._tokenizer is None:
            folder = str(model_cache.resolve_model(self._model_path))
            self._tokenizer = weights.load_tokenizer(folder, trust_remote_code=trusts_code(self.args))
        return self._tokenizer

    def __getattr__(self, name: str) -> Any:
        why = NOT_OURS.get(name)
        raise AttributeError(f"{type(self).__name__} has no {name}{f': {why}' if why else ''}")

    # ---- from arguments to a run ---------------------------------------------------------------------------------------------

    def _arguments(self, args: Any, model: Any) -> Any:
        if args is None:
            name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or "model"
            return self.config_class(output_dir=f"{str(name).rstrip('/').rpartition('/')[2]}-{self.suffix}")
        if isinstance(args, self.config_class):
            return args
        wanted = self.config_class.__name__
        if isinstance(args, Arguments):
            raise ConfigError(f"args: {type(args).__name__} given; {type(self).__name__} takes {wanted}")
        raise ConfigError(f"args: of type {type(args).__module__}.{type(args).__name__}; it must be corrente.{wanted}")

    def put_model(self) -> str:
        """Bring the given model to where a run finds it, again if its weights have changed since; returns the directory."""
        download = download_arguments(self.args)
        self._model_path = self._model_folder.model(self._given_model, self._given_class, download=download)
        return self._model_path

    def _facts(self, model: str) -> Facts:
        return Facts(
            model=model,
            rows=trainer_inputs.rows(self.train_dataset),
            evaluates=self.eval_dataset is not None,
            eval_rows=trainer_inputs.rows(self.eval_dataset),
            tables={"run.dir": str(self._output / "runs"), **self._tables},
        )

    def _resolve(self, model: str) -> RunConfig:
        if self.train_dataset is None:
            raise ConfigError("train_dataset: give one; a list of dicts with a 'prompt' in each will do")
        config = translate(self.args, self._facts(model))
        try:
            check_config(config, self._inputs)
        except ConfigError as error:
            raise with_argument_names(error, self.args) from None
        return config

    def _env_tables(self) -> dict[str, Any]:
        turns = self.args.max_tool_calling_iterations
        if not self._inputs.tools and self._inputs.environment_factory is None:
            return {}
        return {
            "env.kind": "tools" if self._inputs.environment_factory is None else "environment",
            "env.max_turns": trainer_inputs.MANY if turns is None else turns + 1,
            "env.max_total_tokens": self.args.max_completion_length,
        }

    def _run_to_start(self, resume: bool | str | None) -> tuple[RunConfig, Path | None]:
        """The config of the run that train() makes or goes on with, and the checkpoint it starts from."""
        if not resume:
            config = self._resolve(self.put_model())
            if isinstance(self._given_model, str | Path) or not isinstance(config.adapters, Full):
                config = self._with_weights(config, self._trained)  # a module that was given has them already
            config, folder = run_folder.create(config)
            run_folder.begin(folder, config)
            return config, None
        start = weights.checkpoint_of(self._output, resume)
        return resuming.resumed(self._resolve(self.put_model()), start, self._output), start

    def _with_weights(self, config: RunConfig, trained: Path | None) -> RunConfig:
        if trained is None:
            return config
        if isinstance(config.adapters, Full):
            return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(trained)))
        return msgspec.structs.replace(config, adapters=msgspec.structs.replace(config.adapters, init=str(trained)))

    # ---- after a run ---------------------------------------------------------------------------------------------------------

    def _take_weights(self, outcome: RunResult) -> None:
        if outcome.checkpoint is not None:
            self._trained = outcome.checkpoint / LEARNER
            if self.args.load_best_model_at_end:
                self._trained = choose_best(self, outcome.checkpoint) / LEARNER
        if self._loaded is not None or not isinstance(self._given_model, str | Path):
            self._loaded = self._load_model()
        self._set_handler_model(self._present_model)

    @property
    def _present_model(self) -> Any:
        """The model, if it is in this process."""
        given = None if isinstance(self._given_model, str | Path) else self._given_model
        return given if self._loaded is None else self._loaded

    def _weights(self) -> Path:
        return self._trained or Path(model_cache.resolve_model(self._model_path))

    def _load_model(self) -> Any:
        trust = trusts_code(self.args)
        return weights.load(self._weights(), self._given_model, self._model_path, trust_remote_code=trust)

    def _summary(self, outcome: RunResult, watcher: Watcher, took_s: float, config: RunConfig) -> dict[str, float]:
        samples = outcome.counts.get("trained", 0) * config.run.group_size
        metrics = {
            "train_runtime": took_s,
            "train_samples_per_second": samples / took_s,
            "train_steps_per_second": outcome.steps / took_s,
            "train_loss": watcher.mean_loss,
        }
        watcher.log(dict(metrics))
        return metrics


class GRPOTrainer(Trainer):
    """TRL's GRPOTrainer: generation and training alternate, in one process; the same pipeline without a buffer."""

    config_class = GRPOConfig
    suffix = "GRPO"


class AsyncGRPOTrainer(Trainer):
    """TRL's AsyncGRPOTrainer: generation never stops and training never waits, within max_staleness versions of one another."""

    config_class = AsyncGRPOConfig
    suffix = "AsyncGRPO"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
        **named: Any,
    ) -> None:
        """TRL's order, which is not that of GRPOTrainer; ``named``: what else that one takes."""
        named |= {"processing_class": processing_class, "callbacks": callbacks, "optimizers": optimizers}
        named |= {"peft_config": peft_config, "tools": tools, "environment_factory": environment_factory}
        super().__init__(model, reward_funcs, args, train_dataset, **named)
