"""The planner: shapes, lengths, formulas, and what comes out of the pipeline with them."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from corrente.cli.main import app
from corrente.config import Limits
from corrente.config.load import load_config
from corrente.data.types import Request, Sampling
from corrente.errors import ConfigError
from corrente.plan.costs import EngineSpeed, LearnerSpeed, deal, memory_use
from corrente.plan.devices import find_device, parse_device
from corrente.plan.lengths import Lengths, parse_lengths, parse_seconds
from corrente.plan.models import MODELS, find_model
from corrente.plan.predict import choose_scale, predict
from corrente.plan.search import search
from corrente.plan.setting import Setting, Split, parse_gpus, parse_split
from corrente.sim.decode_clock import DecodeClock
from corrente.sim.distributions import Fixed
from corrente.sim.speed import Speed
from corrente.testing.world import World, flow, simulate

TINY = "SmolLM2-135M"
LONG = Limits(episode_s=1e6, watchdog_s=1e6)


def setting(**changes: Any) -> Setting:
    base = Setting(
        model=find_model("Qwen3-8B"),
        device=find_device("H100"),
        devices=8,
        prompts=8,
        group=4,
        lengths=Lengths(mean=400, maximum=2000),
    )
    return msgspec.structs.replace(base, **changes)


# ---- models and devices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("SmolLM2-135M", 0.135, 0.135),
        ("Qwen3-0.6B", 0.596, 0.596),
        ("Qwen3-8B", 8.19, 7.57),
        ("Qwen3-32B", 32.76, 31.98),
        ("Qwen3-30B-A3B", 30.5, 3.04),
        ("Qwen3-235B-A22B", 235.1, 21.6),
        ("Llama-3.1-8B", 8.03, 7.5),
        ("Llama-3.1-70B", 70.55, 69.5),
        ("DeepSeek-V3", 671.0, 36.6),
    ],
)
def test_parameters_are_those_that_models_are_published_with(name: str, billions: float, active: float):
    shape = find_model(name)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
def test_shape_of_a_directory_has_the_parameters_of_the_model(kind: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "intermediate_size": 96,
    }
    more = {
        "llama": {"num_key_value_heads": 2},
        "qwen3_moe": {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        "deepseek_v3": {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    }[kind]
    config = transformers.AutoConfig.for_model(kind, **sizes, **more)
    config.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert find_model(str(tmp_path)).parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)


def test_name_may_have_an_owner_and_an_ending():
    assert find_model("Qwen/Qwen3-8B") == find_model("meta/qwen3-8b-instruct") == MODELS["qwen3-8b"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_model("gpt-9"), "no model 'gpt-9' is known"),
        (lambda: find_device("H9"), "no device 'H9' is known"),
        (lambda: parse_gpus("H100"), 'such as "64xH100"'),
        (lambda: parse_gpus("0xH100"), 'such as "64xH100"'),
        (lambda: parse_split("9:9", 8), "at most 8 together"),
        (lambda: parse_split("4", 8), "GENERATING:TRAINING"),
        (lambda: parse_device("tflops=fast"), "is no number"),
        (lambda: parse_device("teraflops=3"), "no key 'teraflops'"),
        (lambda: parse_lengths("long"), "'long' is not"),
        (lambda: parse_lengths("tail 9"), "must name a mean"),
        (lambda: parse_lengths("mean 9, tail 3"), "lies below the mean"),
        (lambda: parse_lengths("mean 9, max 9"), "at or below the mean"),
        (lambda: parse_seconds("soon", flag="--tools"), "--tools 'soon'"),
        (
            lambda: predict(setting(model=find_model("Llama-3.1-70B")), Split(generating=4, training=4)),
            "does not fit 1 x H100",
        ),
    ],
)
def test_wrong_question_is_refused_with_what_to_write(call: Any, message: str):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        call()


def test_mixture_reads_the_experts_that_its_tokens_need():
    shape = find_model("Qwen3-30B-A3B")
    one, many = shape.read_parameters(1), shape.read_parameters(4096)
    assert one == pytest.approx(shape.active_parameters, rel=1e-6)
    assert many == pytest.approx(shape.dense_parameters + 48 * 128 * shape.expert_parameters, rel=1e-6)


# ---- lengths -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["mean 300", "mean 300, max 900", "mean 300, tail 2k, max 4k", "mean 300, tail 3k, shared 0"]
)
def test_drawn_lengths_have_the_mean_and_tail_that_were_asked_for(text: str):
    lengths = parse_lengths(text)
    draw = lengths.drawer(0)
    found = [
        draw(Request(id=f"{prompt}/{own}", tokens=np.array([prompt], np.int32), sampling=Sampling(), seed=own))
        for prompt in range(3000)
        for own in range(4)
    ]
    assert statistics.fmean(found) == pytest.approx(lengths.mean, rel=0.06)
    assert max(found) <= (lengths.maximum or math.inf)
    if lengths.tail:
        assert np.quantile(found, 0.99) == pytest.approx(min(lengths.tail, lengths.maximum or math.inf), rel=0.2)


def test_completions_of_a_prompt_are_alike_as_far_as_their_variance_is_shared():
    def spread_within(shared: float) -> float:
        draw = Lengths(mean=300, tail=2000, shared=shared).drawer(1)
        logs = [
            [
                math.log(draw(Request(id="", tokens=np.array([prompt], np.int32), sampling=Sampling(), seed=own)))
                for own in range(8)
            ]
            for prompt in range(400)
        ]
        return statistics.fmean(statistics.variance(group) for group in logs)

    sigma = Lengths(mean=300, tail=2000).sigma
    assert spread_within(0.0) == pytest.approx(sigma**2, rel=0.1)
    assert spread_within(0.75) == pytest.approx(0.25 * sigma**2, rel=0.1)
    assert spread_within(1.0) == pytest.approx(0.0, abs=1e-12)


# ---- costs -------------------------------------------------------------------------------------------------------------------


def test_steps_of_a_growing_context_take_what_their_sum_takes():
    speed = Speed(step_s=0.01, per_sequence_s=0.001, context_token_s=1e-5)
    clock = DecodeClock(speed)
    clock.add(100)
    clock.add(50)
    # k steps cost the integral of the linear growth, so the context of a step is that at its middle.
    expected = sum(0.012 + (150 + 2 * (step + 0.5)) * 1e-5 for step in range(40))
    assert clock.seconds_until(40, 2) == pytest.approx(expected, rel=1e-12)
    clock.advance(expected / 2, 2)
    clock.advance(expected / 2, 2)
    assert clock.steps == pytest.approx(40, rel=1e-9)
    clock.remove(90, last=False)
    assert clock.seconds_until(41, 1) == pytest.approx(0.011 + (230 - 90 + 0.5) * 1e-5, rel=1e-9)


def test_decode_step_is_bound_by_reading_weights_and_then_by_products():
    speed = EngineSpeed(model=find_model("Qwen3-8B"), device=find_device("H100"))
    assert speed.decode_s(2) == pytest.approx(speed.decode_s(1), rel=1e-6)
    assert speed.decode_s(4000) - speed.decode_s(3000) == pytest.approx(1000 * 2 * 7.57e9 / (989e12 * 0.5), rel=0.01)
    halves = EngineSpeed(model=find_model("Qwen3-8B"), device=find_device("H100"), parallel=2)
    assert 0.5 < halves.decode_s(1) / speed.decode_s(1) < 1


def test_sequences_are_dealt_evenly_and_a_long_one_bounds_the_step():
    shares = deal([5, 4, 3, 3, 2, 1], 3)
    assert sorted(map(sum, shares)) == [6, 6, 6]
    speed = LearnerSpeed(model=find_model("Qwen3-8B"), device=find_device("H100"), ranks=4, simulated_ranks=4)
    even, uneven = speed.seconds([1000] * 64), speed.seconds([1000] * 32 + [32000])
    assert uneven > 1.9 * even


def test_memory_says_by_how_much_a_model_does_not_fit():
    memory = memory_use(setting(model=find_model("Qwen3-32B")), Split(generating=4, training=4, tensor_parallel=4))
    assert memory.sequences > 0
    assert not memory.fits
    assert memory.learner - memory.capacity > 60e9


# ---- predictions -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "rate", "seconds"),
    [(2000, 6300, 162.5), (2000, 1200, 853.3), (32000, 1200, 13653.3), (32000, 9600, 1706.7)],
)
def test_rollouts_take_their_tokens_over_the_rate(tokens: int, rate: float, seconds: float):
    """The plain figures: 512 rollouts at a rate of the whole pool, which does not depend on how many are live."""
    world = World(
        lengths=Fixed(tokens),
        speed=Speed(step_s=0.0, per_sequence_s=1 / rate),
        prompt_tokens=2,
        step_s=Fixed(0.0),
        deliver_s=Fixed(0.0),
    )
    run = simulate(
        flow(steps=1, prompts=64, size=8, ahead=0, window=0, max_tokens=tokens, limits=LONG), world, limit_s=1e6
    )
    assert run.error is None
    assert run.elapsed_s == pytest.approx(seconds, rel=1e-3)


def test_one_straggler_bounds_a_synchronous_step_and_less_of_one_that_runs_ahead():
    def step_s(ahead: int) -> float:
        def length(request: Request) -> float:
            return 4000.0 if request.id.endswith("/0/0") and int(request.tokens[1]) % 4 == 0 else 200.0

        world = World(
            lengths=length, speed=Speed(step_s=0.01, per_sequence_s=0.0), step_s=Fixed(1.0), deliver_s=Fixed(0.0)
        )
        run = simulate(flow(steps=12, prompts=4, size=4, ahead=ahead, max_tokens=1 << 20), world, limit_s=1e6)
        assert run.error is None
        return run.elapsed_s / 12

    synchronous = step_s(0)
    assert synchronous > 40.0
    assert step_s(3) < 0.5 * synchronous


def test_running_ahead_hides_the_shorter_of_generation_and_training():
    question = setting()
    turns = predict(question, Split(generating=4, training=4, ahead=0), steps=4)
    ahead = predict(question, Split(generating=4, training=4, ahead=2), steps=4)
    assert turns.lag_max == 0
    assert 0 < ahead.lag_max <= 2
    assert ahead.step_s < turns.step_s
    assert "in turns" in turns.waiting
    assert turns.device_hours == pytest.approx(turns.step_s * 1000 / 3600 * 8)


def test_same_seed_gives_the_same_prediction_and_a_part_nearly_the_same():
    question = setting(devices=16, prompts=64, group=8)
    split = Split(generating=8, training=8)
    assert choose_scale(question, split) == 1
    assert choose_scale(setting(devices=16, prompts=512, group=16), split) == 8
    whole = predict(question, split, steps=4)
    assert whole == predict(question, split, steps=4)
    part = predict(question, split, steps=4, scale=2)
    assert part.step_s == pytest.approx(whole.step_s, rel=0.1)
    assert part.samples_per_s == pytest.approx(whole.samples_per_s, rel=0.1)


def test_search_keeps_to_its_limits_and_says_why():
    question = setting(lengths=Lengths(mean=100, maximum=300))
    found = search(question, max_ahead=2, steps=3)
    assert found.best.samples_per_s == max(made.samples_per_s for made in found.tried if made.split == found.best.split)
    assert found.best.split.ahead <= 2
    assert found.best.split.generating + found.best.split.training == 8
    assert all(memory_use(question, made.split).fits for made in found.tried)
    assert len(found.reasons) == 3


# ---- the command -------------------------------------------------------------------------------------------------------------


def ask(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", *words])


def test_command_prints_variants_and_writes_a_config_that_loads(tmp_path: Path):
    out = tmp_path / "plan.toml"
    done = ask(
        "--model",
        "Qwen3-8B",
        "--gpus",
        "4xH100",
        "--prompts",
        "4",
        "--group",
        "2",
        "--tokens",
        "mean 60, max 200",
        "--out",
        str(out),
    )
    assert done.exit_code == 0, done.output
    for text in (
        "Qwen3-8B (8.19B parameters) on 4 x H100",
        "synchronous, shared GPUs",
        "one version ahead",
        "a learner's device",
    ):
        assert text in done.output
    config = load_config(out)
    assert (config.run.prompts_per_step, config.run.group_size, config.sampling.max_tokens) == (4, 2, 200)
    assert (config.staleness.max, config.pool.replicas) == (1, 2)


def test_command_reads_a_config_and_prints_json(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(
        "[run]\nprompts_per_step = 4\ngroup_size = 2\n"
        f'[model]\npath = "{TINY}"\n[sampling]\nmax_tokens = 90\n[staleness]\nmax = 2\n'
    )
    done = ask(str(file), "--gpus", "2xCPU", "--json")
    assert done.exit_code == 0, done.output
    made = json.loads(done.output)
    assert [prediction["split"]["ahead"] for prediction in made] == [0, 0, 1, 2]
    assert all(prediction["step_s"] > 0 for prediction in made)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "8xH100"], "--model is missing"),
        (
            ["--model", "Qwen3-8B", "--gpus", "8xH100", "--split", "5:3", "--tp", "2"],
            "5 generating devices are not whole engines of 2",
        ),
    ],
)
def test_wrong_flags_end_with_one_line_and_code_2(words: list[str], message: str):
    done = ask(*words)
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output
