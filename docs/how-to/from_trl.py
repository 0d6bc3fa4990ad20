"""Writes from-trl.md: how a TRL script moves here, and where each argument of TRL's configs stands, from corrente.trl.

python docs/how-to/from_trl.py            write it
python docs/how-to/from_trl.py --check    exit 1 when it is not current
"""

from __future__ import annotations

import sys
from pathlib import Path

from corrente.trl.argument import Argument
from corrente.trl.callbacks import UNSUPPORTED_EVENTS
from corrente.trl.config import ARGUMENTS
from corrente.trl.methods import ASYNC, ELSEWHERE, GRPO, SHARED
from corrente.trl.training import TRAINING

PAGE = Path(__file__).with_name("from-trl.md")


def main() -> None:
    page = render()
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page)
    PAGE.write_text(page, encoding="utf-8")


def render() -> str:
    """The whole page."""
    counts = {
        stance: sum(a.stance == stance for a in ARGUMENTS.values()) for stance in ("key", "rule", "implied", "refused")
    }
    return "".join(
        [
            INTRO_TEXT,
            f"\n{len(ARGUMENTS)} arguments: {counts['key'] + counts['rule']} decide keys here, {counts['implied']} are implied, ",
            f"{counts['refused']} are refused unless they are left at their default.\n",
            _section("In both of TRL's configs, beside TrainingArguments", SHARED),
            _section("Of GRPOConfig, and of AsyncGRPOConfig here", GRPO),
            _section("Of AsyncGRPOConfig alone", ASYNC),
            _section("TrainingArguments", TRAINING),
            "\n### Names of other versions\n\n| name | use |\n|---|---|\n",
            *(f"| `{name}` | {use} |\n" for name, use in ELSEWHERE.items()),
            "\n### Events that callbacks cannot wait for\n\n| event | why |\n|---|---|\n",
            *(f"| `{event}` | {why} |\n" for event, why in UNSUPPORTED_EVENTS.items()),
        ]
    )


def _section(title: str, arguments: tuple[Argument, ...]) -> str:
    return "".join([f"\n### {title}\n\n| argument | default | here | |\n|---|---|---|---|\n", *map(_row, arguments)])


def _row(argument: Argument) -> str:
    default = f"`{argument.default!r}`"
    if argument.default_for(asynchronous=True) != argument.default:
        default += f", asynchronous `{argument.asynchronous!r}`"
    where = f"`{argument.key}`" if argument.key else argument.stance
    note = argument.note
    if argument.stance == "refused" and argument.also:
        note += f"; {', '.join(f'`{value!r}`' for value in argument.also)} will do"
    return f"| `{argument.name}` | {default} | {where} | {note.replace('|', chr(92) + '|')} |\n"


INTRO_TEXT = """\
# From TRL

A script for TRL's `GRPOTrainer` changes one line to train asynchronously:

```text
- from trl import GRPOConfig, GRPOTrainer
+ from corrente import AsyncGRPOConfig as GRPOConfig, AsyncGRPOTrainer as GRPOTrainer
```

One for `trl.experimental.async_grpo` imports `AsyncGRPOConfig` and `AsyncGRPOTrainer` from `corrente` instead. `GRPOConfig` and
`GRPOTrainer` are there too: the synchronous baseline, in which the same pipeline generates, trains and publishes in turn, in one
process. Names, defaults and meanings are those of TRL 1.16; TRL need not be installed.

```python model
from corrente import AsyncGRPOConfig, AsyncGRPOTrainer


def short(completions, **kwargs):
    return [-float(len(text)) for text in completions]


trainer = AsyncGRPOTrainer(
    model="smollm2-135m-instruct",
    reward_funcs=short,
    args=AsyncGRPOConfig(output_dir="out", max_steps=2, num_generations=4, max_completion_length=8, max_staleness=1),
    train_dataset=[{"prompt": "One word for blue:"}, {"prompt": "One word for red:"}],
)
trainer.train()
print(trainer.state.log_history[-1])
```

Engine and learner are processes of their own that do not import the script, so it needs no `if __name__ == "__main__"`, and a
notebook will do. Objects it brings (functions, datasets, tools, environments, callbacks) stay in its own process.

## What is the same

- Constructor arguments `model` (a directory, a name of the hub, a loaded model), `reward_funcs` (functions, names such as
  `"module:function"`, sequence classifiers by name or loaded, lists of these), `args`, `train_dataset`, `eval_dataset`,
  `processing_class`, `reward_processing_classes`, `callbacks`, `peft_config`, `tools` and `environment_factory`.
- `train(resume_from_checkpoint=...)`, `evaluate()`, `save_model()`, `push_to_hub()`, `add_callback()`, `remove_callback()`,
  `pop_callback()`; `log_metrics()`, `save_metrics()`, `save_state()`, `create_model_card()`, and what scripts ask of
  `accelerator`: `print()`, `is_main_process`, `wait_for_everyone()`, `unwrap_model()`. `trainer.model` has the trained weights
  after `train()`; `state.log_history` has TRL's metric names, of one of several evaluation datasets as `eval_NAME_reward`.
- Callbacks of transformers are called with its `TrainingArguments` names, `TrainerState` and `TrainerControl`, and
  `control.should_training_stop` ends the run at the next version. What a callback raises, `train()` raises. They get the
  tokenizer as `processing_class`; `model` is None while the learner, another process, trains it, and in `on_train_begin` and
  `on_train_end` the one that was given as an object, or that `trainer.model` has loaded.
- Batches are counted alike: `per_device_train_batch_size` x `gradient_accumulation_steps` completions a step, `num_generations`
  of each prompt.

## What differs

- Python code that comes with a model, a tokenizer or a reward model is run only with `trust_remote_code=True`, in the config or
  in its `model_init_kwargs`. Without it, what transformers cannot load by itself is refused at construction, and nobody is asked
  on the terminal.
- A step is made of whole groups: its completions must be a multiple of `num_generations`.
- Nothing is loaded before every value was checked. A fault is a `ConfigError` (a `ValueError`) that names the argument.
- `max_staleness` is kept by admission instead of by throwing away what is older, and groups are trained in the order they were
  admitted (`buffer.window = 1`). `corrente={"buffer.window": 0}` lets the quick pass the slow, at a
  [greater age](../explanation/staleness.md).
- Runs are in `output_dir/runs/NAME`, with metrics.jsonl, samples.jsonl and the config; checkpoints are there, and
  `output_dir/checkpoint-N` leads to the model of each. A second run in the same `output_dir` takes another name.
- `train()` called again goes on with the trained weights; schedule and optimizer begin anew, and so does the reference of the KL.
- A reward function that raises costs the completions it was asked about, with a logged warning that has file and line, and ends
  the run only where it does so too often (`limits.failure_fraction`), or where nothing is left to train on.
- A completion to which no reward function applies (`None` of all) is not trained on.
- Warm-up begins at `learning_rate / warmup_steps`, not at 0: the first step trains.
- Ctrl-C, in a script or a notebook, stops the run at the next version with a checkpoint, and `train()` raises
  `KeyboardInterrupt`; so do SIGTERM and SIGHUP. `train(resume_from_checkpoint=True)` goes on: with the same data, seed, batch,
  model and adapter, while epochs, steps, learning rate and precision may be others. What cannot be resumed is refused before
  anything is changed.
- `evaluate()` raises `PipelineError` when every completion was lost, and warns of some.
- Checkpoints and evaluations are planned before the run. One that a callback asks for by `control.should_save` or
  `control.should_evaluate` at another step is not made; events.jsonl says so.
- Every group is trained on, as in TRL. `corrente={"filter.zero_variance": "replace"}` admits others in place of those that teach
  nothing.
- Reward functions may be lambdas and closures, with `AsyncGRPOTrainer` too. Calls of theirs, of tools and of environments have
  600 s (`reward.deadline_s`, `env.deadline_s`); generation and evaluation have no deadline, as in TRL, and `limits.watchdog_s`
  ends a run in which nothing moves.
- A vLLM server on another host fetches weights from the learner over `http`, at the address of this machine that faces it;
  `corrente={"sync.host": ...}` names another.

## Everything else

`corrente={...}` in either config sets [any key](../reference/configuration.md), and wins over what follows from other arguments:

```python
from corrente import AsyncGRPOConfig

args = AsyncGRPOConfig(output_dir="out", corrente={"sync.kind": "disk", "inflight.kind": "resume", "staleness.correct": "tis"})
```

With vLLM: `use_vllm=True` and `vllm_mode="colocate"` launch a server beside the learner; `vllm_server_base_url="http://..."`
attaches to one that was started as [Generate with vLLM](vllm.md) says. Without either, `AsyncGRPOConfig` generates with the
embedded engine.

## Every argument

A key in the third column is what the argument decides. *implied*: accepted, and without effect of its own, because it is so
anyway or cannot matter here. *refused*: any other value than the default raises `ConfigError` with the reason given.
"""


if __name__ == "__main__":
    main()
