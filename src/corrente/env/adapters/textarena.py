"""Games of TextArena: each player is an agent with a view of its own, and earns the game's final reward.

An agent is told what is new to it since its last turn; its own words are in its context already, so not repeated. Wrappers of a
game that rewrite actions are used, those that gather the whole history into each observation are not: the conversation does that.

TextArena draws from Python's global generator. It is given a state of its own while a game is reset or stepped, one game at a
time, so that games are repeatable and leave no trace. Some games load word lists from the network when they are made.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from corrente.env.adapters.packages import import_package
from corrente.env.environment import Observation
from corrente.errors import ConfigError

_LOCK = threading.Lock()


class TextArena:
    """Implements Environment, with plain methods. ``game``: an id of TextArena's registry; ``options``: arguments of the game.

    Agents are "player_0", "player_1", ...; a game for one is played by "policy".
    """

    def __init__(self, game: str, *, players: int = 2, **options: Any) -> None:
        self._arena = import_package("textarena", of="TextArena", install="textarena")
        registry = import_package("textarena.envs.registration", of="TextArena", install="textarena").ENV_REGISTRY
        if game not in registry:
            near = sorted(name for name in registry if name.lower().startswith(game[:4].lower()))
            raise ConfigError(f"env.options.game = {game!r}: TextArena has no such game{_suggest_names(near)}")
        self._players = players
        with _LOCK:
            self._game = self._arena.make(game, **options)
        self._core = self._game
        while isinstance(self._core, self._arena.Wrapper):
            self._core = self._core.env
        self._state = random.Random(0).getstate()

    def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
        """Begin a game. ConfigError for a number of players that the game does not take."""
        self._state = random.Random(seed).getstate()
        with self._own_random_state():
            try:
                self._game.reset(num_players=self._players, seed=seed)
            except AssertionError as error:
                raise ConfigError(f"env.options.players = {self._players}: {error}") from error
        return self._observe()

    def step(self, message: Mapping[str, Any]) -> Observation:
        """Take the action of whose turn it is."""
        with self._own_random_state():
            done, _ = self._game.step(action=str(message.get("content") or ""))
            if not done:
                return self._observe()
            earned, about = self._game.close()
        rewards = {self._agent_name(player): float(reward) for player, reward in (earned or {}).items()}
        if self._players == 1:
            return Observation(done=True, reward=rewards.get("policy"), info=_end_info(about))
        return Observation(done=True, rewards=rewards, info=_end_info(about))

    def close(self) -> None:
        """Nothing is held."""

    def _observe(self) -> Observation:
        player, lines_said = self._core.get_observation()
        kinds, names = self._arena.ObservationType, self._core.state.role_mapping
        lines = [
            text if sender == self._arena.GAME_ID else f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in lines_said
            if not (kind is kinds.PLAYER_ACTION and sender == player)
        ]
        return Observation(agent=self._agent_name(player), messages=({"role": "user", "content": "\n".join(lines)},))

    def _agent_name(self, player: int) -> str:
        return "policy" if self._players == 1 else f"player_{player}"

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        """Put the game's own state into the global generator, one game at a time, and restore the caller's afterwards."""
        with _LOCK:
            outside = random.getstate()
            random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(outside)


def _suggest_names(names: list[str]) -> str:
    return f"; near it are {', '.join(names[:8])}" if names else ""


def _end_info(about: Mapping[int, Mapping[str, Any]] | None) -> dict[str, Any]:
    """Summarise the end of a game: its reason, and the number of invalid moves."""
    players = list((about or {}).values())
    reasons = [str(player["reason"]) for player in players if player.get("reason")]
    wrong = float(sum(bool(player.get("invalid_move")) for player in players))
    return {"invalid_moves": wrong, **({"reason": reasons[0]} if reasons else {})}
