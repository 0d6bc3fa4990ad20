"""Distillation in a config: what is accepted, and that every fault is one line; which teacher speaks of which prompt."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest
from tests.refusals import refusal

from corrente.algo import distill_checks
from corrente.algo.grouped import GroupedAlgorithm
from corrente.config import RunConfig
from corrente.config.load import parse_config
from corrente.data.types import Group, Scores, TeacherLogprobs, Tokens
from corrente.entrypoints.checks import check_config
from corrente.errors import ConfigError
from corrente.score.teacher import TeacherSource
from corrente.testing import samples

TEACHER = {"kind": "teacher", "path": "somewhere", "top": 4}
SERVER = {"kind": "teacher_server", "url": "http://h/v1", "model": "m", "tokenizer": "somewhere", "top": 4}
OWN = {"kind": "self_teacher", "top": 4}


def parse(*scorers: dict[str, Any], functions: tuple[str, ...] = ("exact_line",), **sections: Any) -> RunConfig:
    reward = {"functions": list(functions), "scorers": list(scorers)}
    return parse_config({"reward": reward, "distill": {"loss": "jsd"}, **sections})


NO_TOP = {**TEACHER, "top": 0}
WARM = {"temperature": 0.7}
WITH_REWARDS = {"loss": "jsd", "beta": 0.0, "reward_weight": 1.0}
REINFORCE = {"loss": "reinforce"}


@pytest.mark.parametrize(
    ("accepted", "neighbour", "message"),
    [
        (parse_config({}), parse(), 'distill.loss = "jsd": there is no teacher; add'),
        (parse(TEACHER), parse(NO_TOP), "reward.scorers[0].top = 0: distill.loss"),
        (parse(NO_TOP, distill={"loss": "advantage", "weight": 0.1}), parse(NO_TOP), "reward.scorers[0].top = 0"),
        (
            parse(OWN, distill=WITH_REWARDS),
            parse(OWN, functions=(), distill=WITH_REWARDS),
            "distill.reward_weight = 1: nothing gives a reward",
        ),
        (
            parse(TEACHER, {**TEACHER, "name": "other"}, OWN, functions=()),
            parse(OWN, {**OWN, "name": "other"}, functions=()),
            'reward.scorers[1].kind = "self_teacher": there is one already',
        ),
        (parse(SERVER), parse(SERVER, sampling=WARM), "sampling.temperature = 0.7: reward.scorers[0] is a server"),
        (
            parse(SERVER, distill={}, sampling=WARM),
            parse(SERVER, sampling=WARM),
            "sampling.temperature = 0.7: reward.scorers[0] is a server",
        ),
        (
            parse(TEACHER, distill={"loss": "k2"}, algo=REINFORCE),
            parse(TEACHER, distill={"loss": "k3"}, algo=REINFORCE),
            'algo.objective.kind = "reinforce" has none',
        ),
        (
            parse(TEACHER, distill={}, sampling={"top_k": 5}),
            parse(TEACHER, sampling={"top_k": 5}),
            "sampling.top_k = 5: distill.loss",
        ),
    ],
)
def test_distill_checks_accepts(accepted: RunConfig, neighbour: RunConfig, message: str):
    assert refusal(distill_checks.check, accepted) == ""
    assert message in refusal(distill_checks.check, neighbour)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (parse(TEACHER, distill={"weight": 2.0}), 'distill.weight = 2: distill.loss = "none" learns nothing'),
        (
            parse(TEACHER, distill={"loss": "k3", "beta": 0.1}),
            'distill.beta = 0.1: distill.loss = "k3" does not use it',
        ),
        (parse(TEACHER, sampling={"top_p": 0.9}), "sampling.top_p = 0.9: distill.loss"),
        (parse(TEACHER, sampling={"min_p": 0.1}), "sampling.min_p = 0.1: distill.loss"),
        (parse(OWN, engine={"kind": "vllm"}), 'engine.kind = "vllm"; it must be "embedded"'),
    ],
)
def test_distill_checks_refuses(config: RunConfig, message: str):
    assert message in refusal(distill_checks.check, config)


def test_teacher_of_a_source_that_is_none_is_refused():
    sums = {"kind": "arithmetic", "name": "sums"}
    prompts = {"kind": "mixture", "sources": [sums, {**sums, "name": "long"}]}
    for where in ({"source": "short"}, {"source": ["sums", "short"]}):
        with pytest.raises(ConfigError, match=r"where: source = 'short'; the sources are called sums, long"):
            check_config(parse({**OWN, "where": where}, prompts=prompts))
    check_config(parse({**OWN, "where": {"source": ["sums", "long"]}}, prompts=prompts))
    with pytest.raises(ConfigError, match=r"reward.scorers\[0\].where needs 'level'"):
        check_config(parse({**OWN, "where": {"level": 1}}, prompts=prompts))


# ---- who is taught ------------------------------------------------------------------------------------------------------------


class Fixed:
    """A teacher that gives every token the same log-prob, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores:
        self.asked += 1
        count = len(tokens) - 1
        return Scores(
            logprobs=np.full(count, -2.0, np.float32),
            top_ids=np.zeros((count, top), np.int32),
            top_logprobs=np.full((count, top), -2.0, np.float32),
            version=7,
        )


def _group(*rewards: float | None, id: int = 0, taught: tuple[TeacherLogprobs, ...] = (), **fields: Any) -> Group:
    """Completions of two tokens."""
    return samples.group(id=id, prompt=samples.prompt(fields=fields), versions=(0, 0), rewards=rewards, taught=taught)


def _marked(group: Group, where: dict[str, Any]) -> tuple[TeacherLogprobs, ...]:
    (mark,) = anyio.run(TeacherSource(Fixed(), name="wise", top=1, weight=0.5, where=where).score_episodes, group)
    return mark.taught


def test_teacher_is_chosen_by_columns_of_the_prompt():
    group = _group(1.0, source="sums", level=2)
    for where in ({}, {"source": "sums"}, {"source": ["words", "sums"], "level": 2}):
        (taught,) = _marked(group, where)
        assert (taught.teacher, taught.weight, taught.version) == ("wise", 0.5, 7)
        assert taught.logprobs.tolist() == [-2, -2]
    for where in ({"source": "words"}, {"source": "sums", "level": 3}, {"kind": "sums"}):
        assert _marked(group, where) == ()


def test_held_out_prompts_are_not_taught():
    assert _marked(_group(1.0, id=-1), {}) == ()


def _algorithm(**distill: Any) -> GroupedAlgorithm:
    return GroupedAlgorithm(parse_config({"distill": distill}))


def test_group_that_was_taught_learns_whatever_its_rewards():
    taught = TeacherLogprobs(
        teacher="wise",
        turn=1,
        logprobs=np.full(2, -1, np.float32),
        top_ids=np.zeros((2, 0), np.int32),
        top_logprobs=np.zeros((2, 0), np.float32),
    )
    plain, pure, mixed = _algorithm(), _algorithm(loss="k2"), _algorithm(loss="k2", reward_weight=1.0)
    equal, alone, silent = _group(1.0, 1.0, taught=(taught,)), _group(None, taught=(taught,)), _group(0.0, 1.0)
    assert [plain.trainable(g) for g in (equal, alone, silent)] == ["all rewards equal", "one survivor", ""]
    assert [pure.trainable(g) for g in (equal, alone, silent)] == ["", "", "no teacher said anything"]
    assert [mixed.trainable(g) for g in (equal, alone, silent)] == ["", "", ""]
    batch = pure.batch([equal, alone], step=0, version=0, oldest_trainable=[None, None])
    assert [[one.teacher for one in row.teachers] for row in batch.rows] == [["wise"]] * 3
    assert plain.batch([equal], step=0, version=0, oldest_trainable=[None]).rows == ()
