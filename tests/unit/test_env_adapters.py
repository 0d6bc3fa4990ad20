"""Environments of real packages through our protocol, and opponents that somebody else plays."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from tests.unit.endpoint import endpoint

from corrente.env.adapters.against import Against
from corrente.env.environment import Observation
from corrente.errors import ConfigError, RolloutError

slow = pytest.mark.slow


def _policy(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _text(observation: Observation) -> str:
    return "\n".join(message["content"] for message in observation.messages)


# ---- textarena --------------------------------------------------------------------------------------------------------------


def _arena(game: str, **options: Any) -> Any:
    pytest.importorskip("textarena", reason="pip install textarena")
    from corrente.env.adapters.textarena import TextArena

    return TextArena(game, **options)


@slow
def test_textarena_players_are_agents_with_views_of_their_own():
    game = _arena("KuhnPoker-v0")
    first = game.reset({}, seed=3)
    assert first.agent in ("player_0", "player_1")
    assert f"You are {first.agent.replace('player_', 'Player ')}" in _text(first)
    mine = set(re.findall(r"Your card is: '(.)'", _text(first)))
    second = game.step(_policy("[check]"))
    assert {first.agent, second.agent} == {"player_0", "player_1"}
    theirs = set(re.findall(r"Your card is: '(.)'", _text(second)))
    assert len(mine) == len(theirs) == 1
    assert mine != theirs


@slow
def test_textarena_says_at_the_end_what_each_player_earned():
    game = _arena("TicTacToe-v0")
    seen = game.reset({}, seed=0)
    for cell in (0, 3, 1, 4, 2):
        assert not seen.done
        winner, seen = seen.agent, game.step(_policy(f"I take [{cell}]"))
    assert seen.done
    assert seen.rewards == {winner: 1.0, ({"player_0", "player_1"} - {winner}).pop(): -1.0}
    assert "has won" in seen.info["reason"]


@slow
def test_textarena_tells_an_agent_only_what_is_new_and_not_its_own_words():
    game = _arena("TicTacToe-v0")
    first = game.reset({}, seed=0)
    game.step(_policy("[0] as I said"))
    again = game.step(_policy("[4] for me"))
    assert again.agent == first.agent
    assert "You are Player" in _text(first)
    assert "You are Player" not in _text(again)
    assert "as I said" not in _text(again)
    assert "for me" in _text(again)


@slow
def test_textarena_games_are_repeatable_beside_one_another_and_leave_the_global_generator_alone():
    def deal(seed: int) -> str:
        return _text(_arena("KuhnPoker-v0").reset({}, seed=seed))

    random.seed(5)
    before = random.getstate()
    alone = [deal(seed) for seed in range(6)]
    assert random.getstate() == before
    assert len(set(alone)) > 1
    games = [_arena("KuhnPoker-v0", max_rounds=3) for _ in range(2)]
    for game in games:
        game.reset({}, seed=1)
    moves = ["[check]", "[bet]", "[fold]", "[check]", "[check]", "[bet]"]
    told: list[list[str]] = [[], []]
    for move in moves:  # in turn: each draws from a state of its own
        for at, game in enumerate(games):
            told[at].append(_text(game.step(_policy(move))))
    assert told[0] == told[1]


@slow
def test_textarena_invalid_moves_are_counted():
    game = _arena("TicTacToe-v0")
    game.reset({}, seed=0)
    game.step(_policy("nothing"))
    seen = game.step(_policy("nothing again"))
    assert seen.done
    assert seen.info["invalid_moves"] == 1.0


@slow
def test_textarena_unknown_game_and_number_of_players_are_refused():
    with pytest.raises(ConfigError, match=r"no such game; near it are .*TicTacToe-v0"):
        _arena("TicTacToe-v9")
    with pytest.raises(ConfigError, match=r"env\.options\.players = 3"):
        _arena("TicTacToe-v0", players=3).reset({}, seed=0)


# ---- gymnasium --------------------------------------------------------------------------------------------------------------

LAKE = {"actions": ["left", "down", "right", "up"], "is_slippery": False}


def _gym(id: str, **options: Any) -> Any:
    pytest.importorskip("gymnasium", reason="pip install gymnasium")
    from corrente.env.adapters.gymnasium import Gymnasium

    return Gymnasium(id, **options)


@slow
def test_gymnasium_is_played_by_the_names_of_actions():
    lake = _gym("FrozenLake-v1", **LAKE)
    seen = lake.reset({}, seed=0)
    assert "left, down, right, up" in _text(seen)
    assert "*S*FFF" in _text(seen)
    for said in ("Down.", "I could go up, but I go down", "RIGHT", "right", "down"):
        seen = lake.step(_policy(said))
        assert not seen.done
    seen = lake.step(_policy("right"))
    assert (seen.reward, seen.done) == (1.0, True)
    lake.close()


@slow
def test_gymnasium_message_without_an_action_is_answered_and_moves_nothing():
    lake = _gym("FrozenLake-v1", invalid=-0.5, **LAKE)
    lake.reset({}, seed=0)
    seen = lake.step(_policy("upright downtown"))
    assert (seen.reward, seen.done) == (-0.5, False)
    assert "no action" in _text(seen)
    assert "*F*FFF" in _text(lake.step(_policy("right"))).replace("S*F*FF", "*F*FFF")
    lake.close()


@slow
def test_gymnasium_observations_that_are_not_rendered_are_printed():
    game = _gym("Blackjack-v1", actions=["stick", "hit"], instruction="")
    assert _text(game.reset({}, seed=1)) == _text(game.reset({}, seed=1))
    assert _text(game.reset({}, seed=1)).startswith("(")
    assert game.step(_policy("stick")).done
    game.close()


@slow
def test_gymnasium_actions_that_are_neither_text_nor_few_are_refused():
    with pytest.raises(ConfigError, match="must be text, or Discrete"):
        _gym("Pendulum-v1")
    with pytest.raises(ConfigError, match="has 4 actions"):
        _gym("FrozenLake-v1", actions=["left"])
    with pytest.raises(ConfigError, match=r"env\.options\.id"):
        _gym("NoSuchLake-v1")


# ---- verifiers: see test_env_verifiers --------------------------------------------------------------------------------------


def test_verifiers_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    from corrente.env.adapters.verifiers import Verifiers

    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ConfigError, match=r"pip install 'verifiers>=0\.4'"):
        Verifiers("letters")


# ---- opponents --------------------------------------------------------------------------------------------------------------


class Counting:
    """Two agents in turn; each message is a number, and the sum is what both hear. Odd turns pay whoever spoke."""

    def __init__(self, turns: int = 4) -> None:
        self._turns = turns
        self.closed = False

    async def reset(self, task: dict[str, Any], *, seed: int) -> Observation:
        self._at, self._sum = 0, seed
        return self._see()

    def step(self, message: dict[str, Any]) -> Observation:
        self._at += 1
        self._sum += int(message["content"])
        seen = self._see()
        reward = 1.0 if self._at % 2 else 0.25
        if self._at < self._turns:
            return msgspec.structs.replace(seen, reward=reward)
        return msgspec.structs.replace(seen, done=True, reward=reward, rewards={"even": 2.0, "odd": 3.0})

    async def close(self) -> None:
        self.closed = True

    def _see(self) -> Observation:
        agent = "odd" if self._at % 2 else "even"
        return Observation(agent=agent, messages=({"role": "user", "content": str(self._sum)},))


HEARD: list[list[dict[str, Any]]] = []


def double(messages: list[dict[str, Any]]) -> str:
    """Say what was heard last."""
    HEARD.append([dict(message) for message in messages])
    return messages[-1]["content"]


HERE = f"{Path(__file__)}"


def _played(environment: Any, *said: str) -> list[Observation]:
    async def main() -> list[Observation]:
        out = [await environment.reset({}, seed=1)]
        out += [await environment.step(_policy(text)) for text in said]
        await environment.close()
        return out

    return anyio.run(main)


def test_opponent_plays_between_the_policys_turns():
    HEARD.clear()
    against = Against(factory=f"{HERE}:Counting", opponents={"odd": f"{HERE}:double"})
    first, second, end = _played(against, "4", "5")
    assert (first.agent, _text(first)) == ("even", "1")
    assert (second.agent, _text(second)) == ("even", "10")  # 1 + 4, doubled
    assert second.reward == 1.0  # for the policy's turn, not for the opponent's
    assert end.done
    assert end.rewards == {"even": 2.0}


def test_opponent_that_begins_is_played_before_the_policy_is_asked():
    against = Against(factory=f"{HERE}:Counting", opponents={"even": f"{HERE}:double"}, options={"turns": 2})
    first, end = _played(against, "1")
    assert (first.agent, _text(first), first.reward) == ("odd", "2", None)
    assert (end.done, end.rewards) == (True, {"odd": 3.0})


def _chat(text: str) -> tuple[int, dict[str, Any]]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_endpoint_plays_with_its_own_view_and_is_asked_again_after_a_5xx():
    with endpoint((503, {}), _chat("7"), _chat("8")) as (url, asked):
        opponent = {"url": url, "model": "frozen", "system": "Count.", "temperature": 0.0}
        _, second, _ = _played(Against(factory=f"{HERE}:Counting", opponents={"odd": opponent}), "4", "5")
    assert _text(second) == "12"
    assert [message["content"] for message in asked[2]["messages"]] == ["Count.", "5", "7", "17"]
    assert [message["role"] for message in asked[2]["messages"]] == ["system", "user", "assistant", "user"]
    assert (asked[0]["model"], asked[0]["temperature"], asked[0]["max_tokens"]) == ("frozen", 0.0, 256)


@pytest.mark.parametrize(
    ("answer", "message"), [((404, {"error": "no such model"}), "answered 404"), ((200, {}), "no chat completion")]
)
def test_endpoint_that_cannot_play_costs_the_episode(answer: tuple[int, dict[str, Any]], message: str):
    with endpoint(answer) as (url, _), pytest.raises(RolloutError, match=message):
        _played(Against(factory=f"{HERE}:Counting", opponents={"odd": {"url": url, "model": "frozen"}}), "4")


@pytest.mark.parametrize(
    ("opponents", "message"),
    [
        ({}, "opponents is empty"),
        ({"odd": {"url": "http://localhost/v1"}}, "opponents.odd"),
        ({"odd": {"url": "http://localhost/v1", "model": "m", "modle": "m"}}, "opponents.odd"),
        ({"odd": f"{HERE}:nobody"}, "has no 'nobody'"),
    ],
)
def test_opponents_that_nobody_can_be_are_refused(opponents: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        Against(factory=f"{HERE}:Counting", opponents=opponents)
