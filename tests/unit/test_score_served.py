"""A teacher behind vLLM's completions endpoint, on loopback: what it is asked, what is read out of its answer, who fails how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from tests.unit.vllm_fake import Asked, Fake, Handler, Say, serving

from corrente.config.load import parse_config
from corrente.data.types import Scores
from corrente.errors import ConfigError, RewardError
from corrente.score import checks, vocabulary
from corrente.score.build import scorer_names
from corrente.score.endpoint import Endpoint
from corrente.score.served import ServedTeacher

TOKENS = np.array([3, 5, 4], np.int32)


def entry(logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": "x"}


PLACES = [
    None,
    {"5": entry(-2.5, 7), "1": entry(-0.25, 1), "9": entry(-1.5, 2)},
    {"4": entry(-0.5, 1), "8": entry(-1.0, 2)},
]


def answers(places: Any) -> Handler:
    return lambda asked: Say(body={"id": "c", "choices": [{"index": 0, "text": "x", "prompt_logprobs": places}]})


def scored(handler: Handler, *, top: int = 2) -> tuple[Scores, Fake]:
    async def main() -> tuple[Scores | RewardError, Fake]:
        async with serving(handler) as fake:
            endpoint = Endpoint(f"{fake.url}/v1/completions", name="far", token="t", deadline_s=5.0)
            teacher = ServedTeacher(endpoint, model="wise", name="far")
            try:
                return await teacher.score(TOKENS, top=top), fake
            except RewardError as error:
                return error, fake
            finally:
                await teacher.close()

    result, fake = anyio.run(main)
    if isinstance(result, RewardError):
        raise result
    return result, fake


def test_tokens_are_sent_as_they_are_and_their_log_probs_read():
    scores, fake = scored(answers(PLACES))
    (asked,) = fake.asked
    assert (asked.path, asked.headers["authorization"]) == ("/v1/completions", "Bearer t")
    assert asked.body == {
        "model": "wise",
        "prompt": [3, 5, 4],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 2,
    }
    assert scores.logprobs.tolist() == [-2.5, -0.5]
    assert scores.top_ids.tolist() == [[1, 9], [4, 8]]
    assert scores.top_logprobs.tolist() == [[-0.25, -1.5], [-0.5, -1.0]]
    assert scores.version is None


def test_likeliest_are_left_out_where_nobody_asks():
    scores, _ = scored(answers(PLACES), top=0)
    assert scores.top_ids.shape == scores.top_logprobs.shape == (2, 0)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (None, "gives no log-probs of a prompt"),
        (PLACES[:2], "gave 2 log-probs for 3 tokens"),
        ([None, {"1": entry(-0.25, 1)}, PLACES[2]], "left out token 1"),
        ([None, PLACES[1], {"4": entry(-0.5, 1)}], "left out token 2, or some of the 2 likeliest"),
        ([None, None, PLACES[2]], "left out token 1"),
        ([None, {"5": {"rank": 1}}, PLACES[2]], "answered with no completion"),
    ],
)
def test_answer_that_is_none_is_an_error_that_names_the_teacher(places: Any, message: str):
    with pytest.raises(RewardError, match=f"far: .*{message}"):
        scored(answers(places))


def test_refusal_is_final_and_trouble_is_tried_again():
    def refuses(asked: Asked) -> Say:
        return Say(status=400, body={"message": "at most 20 log-probs"})

    with pytest.raises(RewardError, match=r"it answered 400: .*at most 20"):
        scored(refuses)
    states = iter([503, 429])

    def recovers(asked: Asked) -> Say:
        status = next(states, 0)
        return Say(status=status) if status else answers(PLACES)(asked)

    scores, fake = scored(recovers)
    assert (len(fake.asked), len(scores.logprobs)) == (3, 2)


def config(**keys: Any) -> Any:
    scorer = {"kind": "teacher_server", "url": "http://h/v1", "model": "m", "tokenizer": "somewhere", **keys}
    return parse_config({"reward": {"functions": ["exact_line"], "scorers": [scorer]}})


def test_wrong_server_is_refused(tmp_path: Path):
    assert scorer_names(config()) == ["teacher"]
    checks.check_reward_settings(config(tokenizer=str(tmp_path)))
    for keys, message in (
        ({"url": "h:8000/v1"}, r"url = 'h:8000/v1': it must begin with http"),
        ({}, r"tokenizer = 'somewhere': it must be a directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            checks.check_reward_settings(config(**keys))
    with pytest.raises(ConfigError, match="has no tokenizer to be compared"):
        vocabulary.check_same_vocabulary(str(tmp_path), str(tmp_path))
