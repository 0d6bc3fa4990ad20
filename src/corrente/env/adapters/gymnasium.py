"""Environments of Gymnasium with text actions, or a few named ones.

The observation is the text the environment renders (``render_mode = "ansi"``) where it renders text, else the observation as it
is printed. A message that names no action is answered, costs ``invalid``, and does not move the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from corrente.env.adapters.packages import import_package
from corrente.env.environment import Observation
from corrente.errors import ConfigError

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Gymnasium:
    """Implements Environment, with plain methods.

    ``id``: of Gymnasium's registry, "module:Name-v0" to import a module first; ``options``: arguments of ``gymnasium.make``.
    ``actions``: a name for each discrete action, in their order; empty: their numbers. ``instruction``: said first; {actions} is
    filled in. ``render``: whether what is rendered as text is what is observed. ConfigError for other actions.
    """

    def __init__(
        self,
        id: str,
        *,
        actions: Sequence[str] = (),
        instruction: str = "Choose one of these actions: {actions}. Answer with it alone.",
        render: bool = True,
        invalid: float = 0.0,
        **options: Any,
    ) -> None:
        gym = import_package("gymnasium", of="Gymnasium", install="gymnasium")
        try:
            spec = gym.spec(id)
        except gym.error.Error as error:
            raise ConfigError(f"env.options.id = {id!r}: {error}") from error
        self._rendered = render and "ansi" in _render_modes(gym, spec)
        self._env = gym.make(spec, **({"render_mode": "ansi"} if self._rendered else {}), **options)
        self._actions = _action_names(gym, self._env.action_space, actions, id=id)
        listed = ", ".join(self._actions) if self._actions else "any text"
        self._instruction = instruction.replace("{actions}", listed)
        self._invalid = invalid

    def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
        """Begin an episode."""
        observed, _ = self._env.reset(seed=seed)
        text = (
            f"{self._instruction}\n\n{self._observation_text(observed)}"
            if self._instruction
            else self._observation_text(observed)
        )
        return Observation(messages=(_user_message(text),))

    def step(self, message: Mapping[str, Any]) -> Observation:
        """Take the action that was named last."""
        text = str(message.get("content") or "")
        action = self._last_action_named(text) if self._actions else text
        if action is None:
            return Observation(
                reward=self._invalid, messages=(_user_message(f"That is no action. {self._instruction}"),)
            )
        observed, reward, ended, cut, _ = self._env.step(action)
        done = bool(ended or cut)
        return Observation(reward=float(reward), done=done, messages=(_user_message(self._observation_text(observed)),))

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _last_action_named(self, text: str) -> int | None:
        """The index of the action whose name comes last in ``text``, as a word of its own; of two that end there, the longer."""
        ends = {
            name: max(
                (m.end() for m in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE)), default=-1
            )
            for name in self._actions
        }
        last = max(self._actions, key=lambda name: (ends[name], len(name)))
        return self._actions.index(last) if ends[last] >= 0 else None

    def _observation_text(self, observed: Any) -> str:
        if self._rendered:
            return _COLOURS.sub("*", str(self._env.render()))
        return str(observed)


def _user_message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _render_modes(gym: Any, spec: Any) -> Sequence[str]:
    maker = spec.entry_point if callable(spec.entry_point) else gym.envs.registration.load_env_creator(spec.entry_point)
    return tuple(getattr(maker, "metadata", {}).get("render_modes", ()))


def _action_names(gym: Any, space: Any, actions: Sequence[str], *, id: str) -> tuple[str, ...]:
    """Names of discrete actions; none for text."""
    if isinstance(space, gym.spaces.Text):
        return ()
    if not isinstance(space, gym.spaces.Discrete) or int(space.start):
        raise ConfigError(f"env.options.id = {id!r}: its actions are {space}; they must be text, or Discrete from 0 on")
    if actions and len(actions) != int(space.n):
        raise ConfigError(f"env.options.actions = {list(actions)}: {id} has {int(space.n)} actions, name each")
    return tuple(actions) or tuple(map(str, range(int(space.n))))
