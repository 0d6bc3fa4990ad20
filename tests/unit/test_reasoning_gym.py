"""Tasks of the real package: repeatable from a seed, resumable, and judged by the dataset they are from."""

from __future__ import annotations

import pytest

from corrente.config import ReasoningGym, RunConfig
from corrente.config.load import parse_config
from corrente.data.types import Prompt
from corrente.entrypoints.checks import check_config
from corrente.errors import ConfigError
from corrente.prompts.build import build, build_eval

pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")
pytestmark = pytest.mark.slow

TASKS = ("leg_counting", "simple_equations", "countdown")


def _config(**prompts: object) -> RunConfig:
    tables = {
        "prompts": {"kind": "reasoning_gym", "tasks": list(TASKS), **prompts},
        "reward": {"functions": ["reasoning_gym"]},
    }
    return parse_config(tables)


def _encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def _columns(*prompts: Prompt) -> dict[str, list[object]]:
    names = ("task", "task_options", "task_seed", "task_index", "task_size", "answer")
    return {name: [prompt.fields[name] for prompt in prompts] for name in names}


def test_tasks_depend_on_the_seed_and_their_number_alone():
    prompts, again = build(_config(), _encode), build(_config(), _encode)
    first = [prompts.next() for _ in range(6)]
    assert all(p is not None for p in first)
    again.restore({"position": 4})
    resumed = [again.next() for _ in range(2)]
    assert [p.text for p in resumed if p] == [p.text for p in first[4:] if p]
    assert [p.text for p in again.find(["0/2", "0/0"])] == [first[2].text, first[0].text]  # pyright: ignore
    assert prompts.state() == {"position": 6}


def test_held_out_tasks_are_others_and_the_same_for_every_run():
    held = build_eval(_config(), _encode)
    other = build_eval(
        parse_config({"prompts": {"kind": "reasoning_gym", "tasks": list(TASKS)}, "run": {"seed": 5}}), _encode
    )
    assert [p.text for p in held] == [p.text for p in other]
    trained = build(_config(), _encode)
    assert not {p.text for p in held} & {p.text for p in (trained.next() for _ in range(64)) if p}


def test_right_answers_earn_all_and_others_less():
    from corrente.score.reasoning_gym import reasoning_gym

    prompts = build(_config(), _encode)
    drawn = [p for p in (prompts.next() for _ in range(12)) if p]
    assert {p.fields["task"] for p in drawn} == set(TASKS)
    right = [f"so it is <answer>{p.fields['answer']}</answer>." for p in drawn]
    assert reasoning_gym(right, **_columns(*drawn)) == [1.0] * 12  # pyright: ignore
    assert max(reasoning_gym(["<answer>no</answer>"] * 12, **_columns(*drawn))) < 0.5  # pyright: ignore


def test_answer_other_than_the_one_given_can_be_right():
    """Countdown has many solutions; the dataset checks the expression, not the text."""
    from corrente.score.reasoning_gym import reasoning_gym

    prompts = build(_config(tasks=["countdown"]), _encode)
    prompt = prompts.next()
    assert prompt is not None
    same, more = f"<answer>({prompt.fields['answer']})</answer>", f"<answer>{prompt.fields['answer']} + 0</answer>"
    scores = reasoning_gym([same, more], **_columns(prompt, prompt))  # pyright: ignore
    assert scores[0] == 1.0
    assert scores[1] < 1.0  # a number that was not offered


def test_task_that_is_not_the_one_played_is_not_judged():
    from corrente.errors import RewardError
    from corrente.score.reasoning_gym import reasoning_gym

    prompt = build(_config(), _encode).next()
    assert prompt is not None
    columns = _columns(prompt) | {"answer": ["another"]}
    with pytest.raises(RewardError, match="another task each time"):
        reasoning_gym(["<answer>1</answer>"], **columns)  # pyright: ignore


def test_options_reach_the_dataset():
    config = _config(tasks=["leg_counting"], options={"leg_counting": {"min_animals": 1, "max_animals": 1}})
    prompt = build(config, _encode).next()
    assert prompt is not None
    assert prompt.text.count(",") <= 3


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"tasks": []}, "name at least one"),
        ({"tasks": ["leg_countin"]}, "has no 'leg_countin'"),
        ({"tasks": ["list_functions"]}, "another task each time"),
        ({"weights": [1.0]}, "one per task"),
        ({"template": "hello"}, "question"),
        ({"options": {"leg_counting": {"min_animals": 9, "max_animals": 2}}}, "prompts.options.leg_counting"),
        ({"options": {"leg_counting": {"animals": 2}}}, "unexpected keyword"),
    ],
)
def test_wrong_tasks_are_refused_before_a_model_loads(prompts: dict[str, object], message: str, tmp_path):
    config = _config(**prompts)
    with pytest.raises(ConfigError, match=message):
        check_config(config)


def test_reward_needs_the_columns():
    with pytest.raises(ConfigError, match="task"):
        check_config(parse_config({"reward": {"functions": ["reasoning_gym"]}}))


def test_config_section_has_defaults():
    assert ReasoningGym(tasks=("leg_counting",)).template.startswith("{question}")
