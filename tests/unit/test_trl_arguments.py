"""TRL's arguments: all of them are in the table, each value goes where the table says, and nothing is silently ignored."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import inspect
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refusal
from transformers import HfArgumentParser, TrainingArguments

from corrente import AsyncGRPOConfig, AsyncGRPOTrainer, GRPOConfig, GRPOTrainer
from corrente.algo import checks as algo_checks
from corrente.config import Embedded, Http, Inline, NoBuffer, Procs, RunConfig, Vllm, Window, schema
from corrente.entrypoints.checks import check_config
from corrente.entrypoints.inputs import RunInputs
from corrente.errors import ConfigError
from corrente.trl import trainer_inputs
from corrente.trl.argument import Argument
from corrente.trl.config import ARGUMENTS, PASSED_ON
from corrente.trl.methods import ASYNC, GRPO, SHARED
from corrente.trl.training import TRAINING
from corrente.trl.translate import Facts, translate

ROOT = Path(__file__).parents[2]


def resolved(args: Any, **facts: Any) -> RunConfig:
    return translate(args, Facts(**{"model": "smollm2-135m-instruct", "rows": 40, **facts}))


def value(config: RunConfig, key: str) -> Any:
    section, _, leaf = key.rpartition(".")
    found = schema.find_section(config, section)
    return schema.kind_of(found) if leaf == "kind" else getattr(found, leaf)


# ---- the table ----------------------------------------------------------------------------------------------------------------


def test_table_has_every_training_argument_of_transformers():
    assert [f.name for f in dataclasses.fields(TrainingArguments) if f.name not in ARGUMENTS] == []


def test_table_names_each_argument_once():
    names = [a.name for a in (*TRAINING, *SHARED, *GRPO, *ASYNC)]
    assert len(names) == len(set(names)) == len(ARGUMENTS)


@pytest.mark.parametrize("argument", ARGUMENTS.values(), ids=lambda a: a.name)
def test_argument_says_where_it_stands(argument: Argument):
    if argument.stance in ("implied", "hint", "refused"):
        assert argument.note
        assert not argument.key
    else:
        assert argument.key
        section, dot, _ = argument.key.rpartition(".")
        if dot and section in schema.sections():
            assert argument.key in schema.all_keys() or section == "observe", argument.key


@pytest.mark.parametrize("argument", [a for a in ARGUMENTS.values() if a.stance == "refused"], ids=lambda a: a.name)
def test_refused_argument_is_refused_by_name_with_the_reason(argument: Argument):
    strange = {bool: True, int: 7, float: 0.123, str: "strange"}.get(type(argument.default), "strange")
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(**{argument.name: strange})
    assert str(caught.value).startswith(f"{argument.name} = {strange!r}")
    assert argument.note in str(caught.value)


@pytest.mark.parametrize("cls", [GRPOConfig, AsyncGRPOConfig])
def test_config_takes_every_default_explicitly(cls: Any):
    fields = [f for f in dataclasses.fields(cls) if f.name != PASSED_ON]
    config = cls(**{f.name: f.default for f in fields})
    assert {f.name: getattr(config, f.name) for f in fields} == {f.name: f.default for f in fields}


@pytest.mark.parametrize(
    ("name", "given", "key", "expected"),
    [
        ("learning_rate", 3e-4, "learner.lr", 3e-4),
        ("weight_decay", 0.1, "learner.weight_decay", 0.1),
        ("adam_beta2", 0.95, "learner.betas", (0.9, 0.95)),
        ("adam_epsilon", 1e-6, "learner.eps", 1e-6),
        ("max_grad_norm", 0.2, "learner.max_grad_norm", 0.2),
        ("lr_scheduler_type", "cosine", "learner.schedule", "cosine"),
        ("gradient_checkpointing", False, "learner.gradient_checkpointing", False),
        ("activation_checkpointing", False, "learner.gradient_checkpointing", False),
        ("bf16", True, "model.dtype", "bfloat16"),
        ("bf16", False, "model.dtype", "float32"),
        ("bf16", None, "model.dtype", "auto"),
        ("model_init_kwargs", {"dtype": "bfloat16"}, "model.dtype", "bfloat16"),
        ("seed", 7, "run.seed", 7),
        ("output_dir", "somewhere", "run.dir", "somewhere/runs"),
        ("run_name", "second", "run.name", "second"),
        ("num_generations", 4, "run.group_size", 4),
        ("max_completion_length", 33, "sampling.max_tokens", 33),
        ("temperature", 0.7, "sampling.temperature", 0.7),
        ("temperature", 0.7, "eval.temperature", 0.7),
        ("use_cpu", True, "model.device", "cpu"),
        ("use_cpu", False, "model.device", "auto"),
        ("top_p", 0.9, "sampling.top_p", 0.9),
        ("top_k", 20, "sampling.top_k", 20),
        ("min_p", 0.05, "sampling.min_p", 0.05),
        ("min_p", None, "sampling.min_p", 0.0),
        ("generation_kwargs", {"stop": "\n"}, "sampling.stop", ("\n",)),
        ("chat_template_kwargs", {"enable_thinking": False}, "chat.template_kwargs", {"enable_thinking": False}),
        ("shuffle_dataset", False, "prompts.shuffle", False),
        ("beta", 0.04, "algo.beta", 0.04),
        ("epsilon", 0.1, "algo.objective.epsilon", 0.1),
        ("epsilon", 0.1, "algo.objective.epsilon_high", 0.1),
        ("epsilon_high", 0.28, "algo.objective.epsilon_high", 0.28),
        ("delta", 1.5, "algo.objective.delta", 1.5),
        ("delta", None, "algo.objective.delta", None),
        ("loss_type", "dr_grpo", "algo.objective.kind", "dr_grpo"),
        ("scale_rewards", True, "algo.advantage.scale_rewards", "group"),
        ("scale_rewards", False, "algo.advantage.scale_rewards", "none"),
        ("scale_rewards", "batch", "algo.advantage.scale_rewards", "batch"),
        ("multi_objective_aggregation", "normalize_then_sum", "algo.advantage.kind", "gdpo"),
        ("mask_truncated_completions", True, "algo.mask_truncated", True),
        ("top_entropy_quantile", 0.2, "algo.top_entropy_quantile", 0.2),
        ("entropy_coef", 0.01, "algo.entropy_coef", 0.01),
        ("off_policy_mask_threshold", 0.5, "staleness.off_policy_mask_threshold", 0.5),
        ("save_steps", 5, "checkpoint.every", 5),
        ("save_strategy", "no", "checkpoint.every", 0),
        ("save_strategy", "epoch", "checkpoint.every", 40),
        ("save_total_limit", 3, "checkpoint.keep", 3),
        ("log_completions", True, "observe.samples", 8),
        ("num_generations_eval", 2, "eval.samples", 2),
        ("max_staleness", 2, "staleness.max", 2),
        ("token_budget", 512, "learner.micro_batch_tokens", 512),
        ("max_inflight_tasks", 16, "engine.max_sequences", 16),
        ("weight_sync_timeout", 60, "sync.deadline_s", 60.0),
        ("heartbeat_stale_after_s", 1800.0, "limits.watchdog_s", 1800.0),
        ("heartbeat_stale_after_s", 33.0, "limits.watchdog_s", 900.0),
        ("top_k", 20, "eval.top_k", 20),
        ("top_p", 0.9, "eval.top_p", 0.9),
        ("min_p", 0.05, "eval.min_p", 0.05),
        ("generation_kwargs", {"temperature": 0.5}, "eval.temperature", 0.5),
        ("generation_kwargs", {"top_k": 7}, "eval.top_k", 7),
        ("corrente", {"sampling.min_p": 0.2}, "eval.min_p", 0.2),
        ("corrente", {"eval.temperature": 0.0}, "eval.temperature", 0.0),
    ],
)
def test_argument_decides_its_key(name: str, given: Any, key: str, expected: Any):
    args = AsyncGRPOConfig(
        **{
            "per_device_train_batch_size": 8,
            **({"num_generations": 8} if name != "num_generations" else {}),
            name: given,
        }
    )
    assert value(resolved(args), key) == expected


@pytest.mark.parametrize("argument", [a for a in ARGUMENTS.values() if a.stance == "implied"], ids=lambda a: a.name)
def test_implied_argument_changes_nothing(argument: Argument):
    other = {bool: not argument.default, int: 7, float: 0.123, str: "no"}.get(type(argument.default), "no")
    assert resolved(AsyncGRPOConfig(**{argument.name: other})) == resolved(AsyncGRPOConfig())


def test_keys_of_the_table_take_another_value():
    """A row "key" really reaches its key: any other number, or the other truth, does."""
    for argument in (a for a in ARGUMENTS.values() if a.stance == "key" and type(a.default) in (int, float)):
        if argument.name in ("num_generations", "num_iterations", "weight_sync_steps", "beta"):
            continue
        other = argument.default + 1 if isinstance(argument.default, int) else argument.default * 0.5 + 0.25
        assert value(resolved(AsyncGRPOConfig(**{argument.name: other})), argument.key) == other


# ---- arithmetic ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"per_device_train_batch_size": 8, "num_generations": 8}, {"prompts_per_step": 1, "steps": 120, "epochs": 3}),
        (
            {"per_device_train_batch_size": 8, "num_generations": 4, "gradient_accumulation_steps": 2},
            {"prompts_per_step": 4, "steps": 30},
        ),
        (
            {"per_device_train_batch_size": 6, "num_generations": 2, "num_train_epochs": 1},
            {"prompts_per_step": 3, "steps": 14, "epochs": 1},
        ),
        ({"num_train_epochs": 0.5}, {"steps": 20, "epochs": 1}),
        ({"max_steps": 12}, {"steps": 12, "epochs": 0}),
        ({"max_steps": 12, "num_iterations": 3}, {"steps": 4, "epochs": 0}),
        ({"num_train_epochs": 1, "weight_sync_steps": 3}, {"steps": 42, "every": 3}),
    ],
)
def test_batches_and_epochs_are_counted_as_in_trl(given: dict[str, Any], expected: dict[str, int]):
    config = resolved(AsyncGRPOConfig(**given))
    found = {
        "prompts_per_step": config.run.prompts_per_step,
        "steps": config.run.steps,
        "epochs": config.prompts.epochs,  # pyright: ignore[reportAttributeAccessIssue]
        "every": config.sync.every,
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "every"),
    [
        ({}, 1),
        ({"gradient_accumulation_steps": 2}, 1),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, 1),
        ({"steps_per_generation": 4}, 4),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, 2),
        ({"generation_batch_size": 32}, 4),
    ],
)
def test_generation_batch_says_how_many_steps_a_version_lasts(given: dict[str, Any], every: int):
    assert resolved(GRPOConfig(**given)).sync.every == every


@pytest.mark.parametrize(
    ("given", "facts", "words"),
    [
        ({"per_device_train_batch_size": 4}, {}, "num_generations = 8: per_device_train_batch_size"),
        ({"num_generations": 1}, {}, "num_generations = 1: it must be an integer of at least 2"),
        ({"per_device_train_batch_size": 0}, {}, "per_device_train_batch_size = 0"),
        ({"max_steps": 10, "num_iterations": 3}, {}, "max_steps = 10: it must be a multiple of num_iterations = 3"),
        ({}, {"rows": None}, "max_steps = -1: the dataset does not say"),
        ({"num_train_epochs": 0}, {}, "num_train_epochs = 0"),
        (
            {"save_steps": 5, "weight_sync_steps": 2},
            {},
            "save_steps = 5: it must be a multiple of the steps of a version (2)",
        ),
        ({"eval_strategy": "steps"}, {}, "eval_strategy = 'steps': give the trainer an eval_dataset"),
        ({"eval_strategy": "sometimes"}, {}, "eval_strategy = 'sometimes': it must be one of no, steps, epoch"),
        (
            {"load_best_model_at_end": True, "save_steps": 4},
            {},
            "load_best_model_at_end = True: it needs the same save_strategy and eval_strategy",
        ),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4, "save_steps": 6},
            {"evaluates": True},
            "load_best_model_at_end = True: save_steps = 6 must be a multiple of eval_steps = 4",
        ),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {}, "lr_scheduler_type = 'reduce_lr_on_plateau'"),
        ({"loss_type": "ppo"}, {}, "loss_type = 'ppo'"),
        ({"scale_rewards": "std"}, {}, "scale_rewards = 'std'"),
        ({"report_to": "comet_ml"}, {}, "report_to = 'comet_ml'"),
        ({"max_staleness": -1}, {}, "max_staleness = -1: it must be at least 0"),
        ({"generation_kwargs": {"num_beams": 2}}, {}, "generation_kwargs['num_beams']"),
        ({"model_init_kwargs": {"num_hidden_layers": 2}}, {}, "model_init_kwargs"),
        ({"dtype": "float16"}, {}, "dtype = 'float16'"),
        ({"save_total_limit": 0}, {}, "save_total_limit = 0"),
        ({"steps_per_generation": 4}, {}, "steps_per_generation = 4: AsyncGRPOConfig says with weight_sync_steps"),
        (
            {"steps_per_generation": 4, "generation_batch_size": 32},
            {},
            "generation_batch_size and steps_per_generation",
        ),
        ({"learning_rate": -1.0}, {}, "learner.lr"),
        ({"learning_rate": -1.0}, {}, "set by learning_rate"),
        ({"corrente": {"staleness.maximum": 2}}, {}, "did you mean staleness.max?"),
        ({"corrente": {"buffer.kind": "none", "staleness.max": 3}}, {}, 'buffer.kind = "none" fixes it at 0'),
    ],
)
def test_wrong_value_is_refused_before_anything_is_loaded(given: dict[str, Any], facts: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as caught:
        resolved(AsyncGRPOConfig(**given), **facts)
    assert words in str(caught.value)
    assert "--set" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lerning_rate", "did you mean learning_rate?"),
        ("stalenes", "did you mean"),
    ],
)
def test_unknown_argument_points_the_way(name: str, words: str):
    with pytest.raises(ConfigError, match=name) as caught:
        AsyncGRPOConfig(**{name: 1})
    assert words in str(caught.value)


def test_argument_of_the_other_config_is_named_as_such():
    with pytest.raises(ConfigError, match="it is one of AsyncGRPOConfig"):
        GRPOConfig(max_staleness=2)


# ---- flow and engines ---------------------------------------------------------------------------------------------------------


def test_synchronous_config_is_one_process_without_a_buffer():
    config = resolved(GRPOConfig())
    assert isinstance(config.runtime, Inline)
    assert isinstance(config.buffer, NoBuffer)
    assert isinstance(config.engine, Embedded)


def test_asynchronous_config_keeps_max_staleness_by_admission():
    from corrente.staleness import gate

    for bound in (0, 1, 4):
        config = resolved(AsyncGRPOConfig(max_staleness=bound))
        assert isinstance(config.runtime, Procs)
        assert isinstance(config.buffer, Window)
        assert gate.max_age(config) == bound


def test_vllm_is_launched_attached_to_or_left_out():
    launched = resolved(GRPOConfig(use_vllm=True, vllm_tensor_parallel_size=2))
    assert isinstance(launched.engine, Vllm)
    assert launched.engine.args[2:4] == ("--tensor-parallel-size", "2")
    attached = resolved(AsyncGRPOConfig(vllm_server_base_url="http://localhost:8000"))
    assert isinstance(attached.engine, Vllm)
    assert attached.engine.urls == ("http://localhost:8000",)
    remote = resolved(GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_host="10.0.0.7"))
    assert isinstance(remote.engine, Vllm)
    assert (remote.engine.urls, schema.kind_of(remote.sync)) == (("http://10.0.0.7:8000",), "http")
    assert isinstance(resolved(AsyncGRPOConfig()).engine, Embedded)


def test_remote_vllm_finds_the_learner_at_the_address_that_faces_it():
    faraway = AsyncGRPOConfig(vllm_server_base_url="http://10.0.0.7:8000")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect(("10.0.0.7", 8000))
            facing = way.getsockname()[0]
        except OSError:  # no way leads out of here: the default stays, which the checks refuse for a server elsewhere
            facing = Http().host
    assert value(resolved(faraway), "sync.host") == facing
    elsewhere = {"sync.kind": "collective", "sync.host": "10.0.0.9"}
    named = resolved(AsyncGRPOConfig(vllm_server_base_url="http://10.0.0.7:8000", corrente=elsewhere))
    assert value(named, "sync.host") == "10.0.0.9"
    on_disk = AsyncGRPOConfig(vllm_server_base_url="http://10.0.0.7:8000", corrente={"sync.kind": "disk"})
    assert schema.kind_of(resolved(on_disk).sync) == "disk"


def test_slow_run_meets_no_deadline_that_trl_has_not():
    tools = Facts(model="smollm2-135m-instruct", rows=40, tables={"env.kind": "tools"})
    for config in (
        translate(GRPOConfig(use_vllm=True), tools),
        translate(AsyncGRPOConfig(vllm_server_base_url="http://localhost:8000"), tools),
    ):
        assert min(value(config, key) for key in ("limits.episode_s", "eval.deadline_s")) > 1e6
        assert min(value(config, key) for key in ("env.deadline_s", "reward.deadline_s")) == 600.0
        assert config.limits.watchdog_s > 600.0


def test_vllm_takes_truncated_sampling_without_top_k_as_trl_does():
    weighed = resolved(GRPOConfig(use_vllm=True, top_p=0.9))
    assert (weighed.sampling.keep_support, weighed.staleness.correct) == (False, "mis")
    algo_checks.check(weighed)
    assert resolved(GRPOConfig(use_vllm=True, top_p=0.9, top_k=50)).sampling.keep_support
    assert resolved(GRPOConfig(top_p=0.9)).sampling.keep_support


@pytest.mark.parametrize(
    ("mode", "low", "expected"),
    [
        ("sequence_mask", None, ("mis", "sequence", 3.0, 0.0)),
        ("token_mask", 0.5, ("icepop", "token", 3.0, 0.5)),
        ("token_truncate", None, ("tis", "token", 3.0, 0.0)),
        ("sequence_truncate", 0.1, ("tis", "sequence", 3.0, 0.1)),
    ],
)
def test_importance_sampling_of_vllm_is_a_correction(mode: str, low: float | None, expected: tuple[Any, ...]):
    args = GRPOConfig(use_vllm=True, vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=low)
    found = resolved(args).staleness
    assert (found.correct, found.correct_level, found.correct_cap, found.correct_floor) == expected
    assert resolved(GRPOConfig(vllm_importance_sampling_mode=mode)).staleness.correct == "none"


def test_trainers_take_arguments_by_position_as_trls_do():
    first = ["model", "reward_funcs", "args", "train_dataset"]
    orders = {
        GRPOTrainer: [*first, "eval_dataset", "processing_class", "reward_processing_classes", "callbacks"],
        AsyncGRPOTrainer: [
            *(*first, "processing_class", "callbacks", "optimizers", "peft_config", "tools", "environment_factory"),
        ],
    }
    for trainer, order in orders.items():
        assert list(inspect.signature(trainer.__init__).parameters)[1 : len(order) + 1] == order


# ---- what is left alone --------------------------------------------------------------------------------------------------------


def test_dictionaries_of_the_user_are_not_changed():
    given = {
        "model_init_kwargs": {"dtype": "float32", "revision": "main"},
        "chat_template_kwargs": {"enable_thinking": False},
        "generation_kwargs": {"stop": ["\n"]},
        "corrente": {"staleness.max": 2, "sync.kind": "disk"},
        "reward_weights": [1.0],
    }
    before = copy.deepcopy(given)
    args = AsyncGRPOConfig(**given)
    resolved(args)
    resolved(args)
    assert given == before


def test_pass_through_wins_over_what_follows_from_the_arguments():
    config = resolved(
        AsyncGRPOConfig(
            max_staleness=4, corrente={"staleness.max": 1, "algo.advantage.kind": "rloo", "buffer.window": 2}
        )
    )
    assert (config.staleness.max, schema.kind_of(config.algo.advantage)) == (1, "rloo")
    assert isinstance(config.buffer, Window)
    assert config.buffer.window == 2
    stream = resolved(AsyncGRPOConfig(corrente={"buffer.kind": "stream", "staleness.reject": 2}))
    assert schema.kind_of(stream.buffer) == "stream"


def test_value_that_is_set_later_counts():
    args = AsyncGRPOConfig()
    args.learning_rate = 0.5
    args.vllm_server_base_url = "http://127.0.0.1:9"
    config = resolved(args)
    assert config.learner.lr == 0.5
    assert isinstance(config.engine, Vllm)
    args.repetition_penalty = 1.1
    with pytest.raises(ConfigError, match="repetition_penalty"):
        resolved(args)


def test_config_is_parsed_from_a_command_line_and_from_a_dictionary():
    parser = HfArgumentParser(GRPOConfig)  # pyright: ignore[reportArgumentType]
    (args,) = parser.parse_args_into_dataclasses(
        [
            "--output_dir",
            "x",
            "--learning_rate",
            "0.5",
            "--max_steps",
            "3",
            "--bf16",
            "false",
            "--corrente",
            '{"run.seed": 3}',
        ]
    )
    assert (args.output_dir, args.learning_rate, args.max_steps, args.bf16) == ("x", 0.5, 3, False)
    assert resolved(args).run.seed == 3
    (again,) = parser.parse_dict({"output_dir": "x", "num_generations": 4})
    assert again.num_generations == 4


def test_argument_that_a_parser_fills_in_was_not_asked_for():
    (parsed,) = HfArgumentParser(AsyncGRPOConfig).parse_args_into_dataclasses([])  # pyright: ignore[reportArgumentType]
    for args in (parsed, dataclasses.replace(AsyncGRPOConfig(), seed=3)):
        assert isinstance(resolved(args).engine, Embedded)
    again = dataclasses.replace(AsyncGRPOConfig(), vllm_server_base_url="http://127.0.0.1:9")
    assert isinstance(resolved(again).engine, Vllm)


def test_evaluation_on_a_stream_takes_all_of_it_unless_a_number_is_given():
    assert resolved(AsyncGRPOConfig(), evaluates=True).eval.prompts >= 1_000_000
    assert resolved(AsyncGRPOConfig(corrente={"eval.prompts": 5}), evaluates=True).eval.prompts == 5
    assert resolved(AsyncGRPOConfig(), evaluates=True, eval_rows=7).eval.prompts == 7


def test_config_can_be_copied_shown_and_written():
    args = AsyncGRPOConfig(output_dir="x", learning_rate=0.5, hub_token="secret")
    again = pickle.loads(pickle.dumps(args))
    assert again.to_dict() == args.to_dict()
    assert repr(args) == "AsyncGRPOConfig(output_dir='x', learning_rate=0.5, hub_token='<HUB_TOKEN>')"
    assert "secret" not in args.to_json_string()
    assert dataclasses.replace(args, learning_rate=0.1).learning_rate == 0.1


@pytest.mark.parametrize("cls", [GRPOConfig, AsyncGRPOConfig])
@pytest.mark.parametrize("loss", ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo"])
def test_config_with_defaults_passes_every_check(cls: Any, loss: str, tmp_path: Path):
    more = {"epsilon_high": 5.0} if loss == "cispo" else {}
    args = cls(output_dir=str(tmp_path), loss_type=loss, **more)
    given = RunInputs(reward_functions=(lambda completions: [0.0] * len(completions),), train_dataset=[{"prompt": "x"}])
    config = translate(args, Facts(model="smollm2-135m-instruct", rows=4, tables={"reward.functions": []}))
    assert refusal(check_config, config, given) == ""
    assert "reward.functions" in refusal(check_config, config, RunInputs(train_dataset=given.train_dataset))


def test_page_is_current():
    path = ROOT / "docs" / "how-to" / "from_trl.py"
    spec = importlib.util.spec_from_file_location("from_trl", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = path.with_name("from-trl.md").read_text(encoding="utf-8")
    assert page == module.render(), "run python docs/how-to/from_trl.py"
    assert [name for name in ARGUMENTS if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("passed_on", [3, "staleness.max=2", ["staleness.max"]])
def test_what_is_passed_on_must_be_a_dictionary(passed_on: Any):
    with pytest.raises(ConfigError, match=r"corrente = .* must be a dictionary"):
        AsyncGRPOConfig(output_dir="out", corrente=passed_on)


# ---- hints and names of other versions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", [a for a in ARGUMENTS.values() if a.stance == "hint"], ids=lambda a: a.name)
def test_hint_is_taken_with_one_line_and_changes_nothing(argument: Argument):
    strange: Any = {bool: True, int: 7, float: 0.123, str: "strange"}.get(type(argument.default), "strange")
    with pytest.warns(UserWarning, match="is accepted") as warned:
        args = GRPOConfig(**{argument.name: strange})
    (line,) = (str(warning.message) for warning in warned)
    assert line == f"{argument.name} = {strange!r} is accepted, and changes nothing here: {argument.note}"
    assert resolved(args) == resolved(GRPOConfig())


def test_how_a_model_is_loaded_is_a_hint():
    with pytest.warns(UserWarning, match="attn_implementation, device_map accepted, and without effect"):
        args = GRPOConfig(model_init_kwargs={"device_map": "auto", "attn_implementation": "sdpa", "dtype": "float32"})
    assert resolved(args).model.dtype == "auto"


@pytest.mark.parametrize(
    ("optim", "name"),
    [
        ("adamw_torch", "adamw"),
        ("adamw_hf", "adamw"),
        ("adafactor", "adafactor"),
        ("sgd", "sgd"),
        ("rmsprop", "rmsprop"),
    ],
)
def test_optimizers_have_their_names_of_transformers(optim: str, name: str):
    assert resolved(GRPOConfig(optim=optim)).learner.optimizer == name


def test_arguments_of_an_optimizer_are_text_or_a_dictionary():
    told = resolved(GRPOConfig(optim="sgd", optim_args="momentum=0.9, nesterov=True")).learner.optimizer_args
    assert told == {"momentum": 0.9, "nesterov": True}
    assert resolved(GRPOConfig(optim="sgd", optim_args=told)).learner.optimizer_args == told


def test_optimizer_whose_package_is_missing_is_refused_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    config = resolved(GRPOConfig(optim="paged_adamw_8bit"))
    assert config.learner.optimizer == "paged_adamw_8bit"
    assert "pip install bitsandbytes" in refusal(check_config, config)


def test_schedule_has_its_arguments():
    args = GRPOConfig(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-7}, max_steps=8)
    assert (resolved(args).learner.schedule, resolved(args).learner.schedule_args) == (
        "cosine_with_min_lr",
        {"min_lr": 1e-7},
    )


def test_deprecated_names_do_what_they_did():
    with pytest.warns(UserWarning, match="warmup_ratio = 0.25 is deprecated: use warmup_steps"):
        args = GRPOConfig(warmup_ratio=0.25, max_steps=8)
    assert resolved(args).learner.warmup_steps == 2
    with pytest.warns(UserWarning, match="max_prompt_length = 5 is deprecated"):
        args = GRPOConfig(max_prompt_length=5)
    assert getattr(resolved(args).prompts, "max_prompt_tokens") == 5  # noqa: B009


@pytest.mark.parametrize("loss", ["grpo", "dapo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_loss_is_taken_at_every_level_with_the_defaults_of_trl(loss: str, level: str):
    if loss == "luspo" and level == "token":
        return  # TRL refuses it as well
    config = resolved(GRPOConfig(loss_type=loss, importance_sampling_level=level))
    algo_checks.check(config)


def test_no_bound_of_the_gradient_is_none_here_as_in_trl():
    assert resolved(GRPOConfig(max_grad_norm=None)).learner.max_grad_norm == 0.0


def test_rank_stabilised_adapters_are_scaled_as_peft_scales_them():
    peft = pytest.importorskip("peft")
    wanted = peft.LoraConfig(r=16, lora_alpha=8, target_modules=["q_proj"], use_rslora=True)
    keys = trainer_inputs.adapters(wanted)
    assert keys["adapters.alpha"] / keys["adapters.rank"] == pytest.approx(8 / 4)


def test_layers_that_nobody_names_are_those_of_peft_for_the_model():
    peft = pytest.importorskip("peft")
    assert trainer_inputs.adapters(peft.LoraConfig(), model_type="llama")["adapters.targets"] == ["q_proj", "v_proj"]
    with pytest.raises(ConfigError, match="peft has none for models of type 'own'"):
        trainer_inputs.adapters(peft.LoraConfig(), model_type="own")


def test_reference_that_follows_has_trls_two_knobs():
    args = GRPOConfig(beta=0.1, sync_ref_model=True, ref_model_sync_steps=8, ref_model_mixup_alpha=0.5)
    algo = resolved(args).algo
    assert (algo.ref_model_sync_steps, algo.ref_model_mixup_alpha) == (8, 0.5)
    assert resolved(GRPOConfig(beta=0.1)).algo.ref_model_sync_steps == 0
