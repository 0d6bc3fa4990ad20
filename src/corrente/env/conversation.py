"""Plays a prompt as a conversation: turns of the policy, and between them what tools and an environment answer.

turn       ends the episode where it is cut by length; flagged, and nobody answers it
its calls  answered by tools, all of a turn at once                                           -> messages, the next turn
no calls   answered by the environment, or the end where there is none                        -> messages, reward, who is next
end        the environment is done, ``max_turns`` are taken, or no token is left of ``max_total_tokens`` or the context

Each agent has a dialogue of its own, begun with what it is told first; the first also reads the prompt. Tokens of prompts, tools
and environments are given, never trained. The members of a group play the same task: the seed of ``reset`` is the prompt's.
An episode that is cut before its environment gave any reward earned 0 from it: to go on for ever must not be free.
A resumed run plays an episode again: the policy's turns come from the record, tools and environments are really asked again.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from corrente.config.env import EnvRules
from corrente.data.types import Completion, Prompt, Request, Sampling, StepScore, Tokens, Turn
from corrente.env.base import Generate, Played
from corrente.env.chat_renderer import ChatRenderer
from corrente.env.dialogue import Dialogue, SampledTurn
from corrente.env.environment import Observation
from corrente.env.instance import EnvInstance
from corrente.env.pool import InstancePool
from corrente.errors import GenerationError, RolloutError
from corrente.prompts.base import Message

COLUMN = "environment"
"""Says which environment a prompt is played in, where there are several."""


class EnvSetup(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An environment to play in: its instances, and the voice that knows its tools."""

    pool: InstancePool
    voice: ChatRenderer


class Conversation:
    """Implements Env. ``settings``: by the name that a prompt has in its column "environment"; one, called "", is for all.
    ``context``: tokens the engine takes, of prompt and completion together. ``shown``: reward functions look at what an episode
    was played in, which stays as it is until they have."""

    def __init__(
        self,
        settings: Mapping[str, EnvSetup],
        *,
        sampling: Sampling,
        rules: EnvRules,
        context: int,
        seed: int = 0,
        shown: bool = True,
    ) -> None:
        self._settings, self._sampling, self._rules = settings, sampling, rules
        self._context, self._seed, self._shown = context, seed, shown

    async def play(self, prompt: Prompt, generate: Generate, *, key: str, group: str, seed: int) -> Played:
        setting = self._setting(prompt)
        stage = await setting.pool.take()
        try:
            played = await _Play(self, setting.voice, stage, prompt, generate, key=key, group=group, seed=seed).run()
        except BaseException:
            await setting.pool.discard(stage)
            raise
        setting.pool.rest(stage)
        if not self._shown:
            await setting.pool.give_back(stage)
            return played

        async def release() -> None:
            await setting.pool.give_back(stage)

        return msgspec.structs.replace(played, environment=stage.shown, release=release)

    def task(self, prompt: Prompt) -> tuple[dict[str, Any], int]:
        """What an environment is told of a prompt: its columns, which are its own to change, and a seed that all of its
        group have."""
        digest = hashlib.blake2b(f"{self._seed}/{prompt.id}".encode(), digest_size=4).digest()
        several = "" not in self._settings
        columns = {name: value for name, value in prompt.fields.items() if not (several and name == COLUMN)}
        return copy.deepcopy(columns), int.from_bytes(digest, "little")

    def sampling(self, dialogue: Dialogue) -> Sampling | None:
        """What the next turn may take; None where nothing is left."""
        room = self._context - len(dialogue.context) if dialogue.after_opening else self._sampling.max_tokens
        if self._rules.max_total_tokens:
            room = min(room, self._rules.max_total_tokens - dialogue.spent)
        tokens = min(room, self._sampling.max_tokens)
        if tokens < 1:
            return None
        return msgspec.structs.replace(self._sampling, max_tokens=tokens)

    @property
    def rules(self) -> EnvRules:
        return self._rules

    @property
    def setups(self) -> Mapping[str, EnvSetup]:
        """The environments by name, with the instances that are played in."""
        return self._settings

    def _setting(self, prompt: Prompt) -> EnvSetup:
        name = "" if "" in self._settings else str(prompt.fields.get(COLUMN, ""))
        if name not in self._settings:
            known = ", ".join(map(repr, self._settings))
            raise RolloutError(f"prompt {prompt.id}: its column {COLUMN!r} is {name!r}; it must be one of {known}")
        return self._settings[name]


class _Play:
    """One episode."""

    def __init__(
        self,
        env: Conversation,
        voice: ChatRenderer,
        stage: EnvInstance,
        prompt: Prompt,
        generate: Generate,
        *,
        key: str,
        group: str,
        seed: int,
    ) -> None:
        self._env, self._voice, self._stage, self._prompt = env, voice, stage, prompt
        self._generate, self._key, self._group, self._seed = generate, key, group, seed
        self._turns: list[Turn] = []
        self._messages: list[dict[str, Any]] = []
        self._dialogues: dict[str, Dialogue] = {}
        self._taken = 0
        self._cut = False
        self._counts: Counter[str] = Counter({"calls": 0, "failures": 0} if stage.functions else {})
        self._steps: list[StepScore] = []
        self._earned: dict[str, float] = {}
        self._given: dict[str, float] = {}
        self._info: dict[str, Any] = {}

    async def run(self) -> Played:
        columns, seed = self._env.task(self._prompt)
        observation = await self._stage.reset(columns, seed=seed)
        self._note(observation)
        while not observation.done and self._taken < self._env.rules.max_turns:
            agent = observation.agent
            dialogue = self._listen(observation)
            sampling = self._env.sampling(dialogue)
            if sampling is None:
                self._cut = True
                break
            completion = await self._sample(dialogue, sampling)
            said = dialogue.say(completion)
            self._taken += 1
            self._messages.append(said.message)
            if completion.finish_reason == "length":
                self._cut = True
                break
            observation = await self._answer(agent, said)
            self._credit(agent, said, observation)
        return self._played(await self._stage.outcome())

    def _listen(self, observation: Observation) -> Dialogue:
        """The dialogue of whose turn is next, with what it is told now; told for the first time, it begins."""
        agent, messages = observation.agent, observation.messages
        if agent in self._dialogues:
            self._dialogues[agent].hear(messages)
            return self._dialogues[agent]
        first = not self._dialogues
        opening = _opening(self._prompt, messages, extends=self._stage.extends_prompt) if first else list(messages)
        self._dialogues[agent] = Dialogue(
            self._voice,
            self._turns,
            opening,
            speaker=agent,
            history=self._env.rules.history,
            tokens=self._prompt.tokens,
        )
        return self._dialogues[agent]

    async def _sample(self, dialogue: Dialogue, sampling: Sampling) -> Completion:
        fresh = not dialogue.after_opening and not self._taken
        request = Request(
            id=f"{self._key}/{self._taken}",
            tokens=dialogue.context,
            sampling=sampling,
            seed=self._seed + self._taken,
            group=_shared(self._group, dialogue.context, self._prompt) if fresh else "",
        )
        completion = await self._generate(request)
        if completion.finish_reason == "abort":
            raise GenerationError(f"request {request.id} was aborted after {len(completion.tokens)} tokens")
        return completion

    async def _answer(self, agent: str, said: SampledTurn) -> Observation:
        if said.calls:
            answers, counts = await self._stage.call(said.calls)
            self._counts.update(counts)
            return Observation(messages=tuple(answers), agent=agent)
        return await self._stage.step(said.message)

    def _credit(self, agent: str, said: SampledTurn, observation: Observation) -> None:
        self._messages += [dict(message) for message in observation.messages]
        self._note(observation)
        if observation.reward is not None:
            self._earned[agent] = self._earned.get(agent, 0.0) + observation.reward
            self._steps.append(StepScore(said.turn, 0, len(self._turns[said.turn].tokens), observation.reward))

    def _note(self, observation: Observation) -> None:
        for agent, reward in observation.rewards.items():
            self._given[agent] = self._given.get(agent, 0.0) + reward
        self._info.update(observation.info)

    def _played(self, outcome: float | None) -> Played:
        several = len(self._dialogues) > 1 or bool(self._given)
        nothing = 0.0 if self._cut and self._stage.judges else None
        earned = None if several else sum(self._earned.values()) if self._earned else nothing
        if outcome is not None:
            earned = outcome + (earned or 0.0)
        judged = {**self._earned, **self._given, **({} if nothing is None else self._dialogues)}
        agents = {a: self._earned.get(a, 0.0) + self._given.get(a, 0.0) for a in judged}
        numbers = {name: float(value) for name, value in self._info.items() if isinstance(value, int | float)}
        first = next(iter(self._dialogues.values()), None)
        return Played(
            turns=tuple(self._turns),
            opening=first.opening_text if first else "",
            messages=tuple(self._messages),
            rewards={self._stage.name: earned} if earned is not None else {},
            agent_rewards=agents if several else {},
            step_scores=tuple(self._steps),
            cut=self._cut,
            metrics={
                "env/turns": float(self._taken),
                "env/forks": float(sum(dialogue.forks for dialogue in self._dialogues.values())),
                **{f"tools/{name}": float(count) for name, count in self._counts.items()},
                **{f"env/{name}": value for name, value in numbers.items()},
            },
            extra={name: value for name, value in self._info.items() if name not in numbers},
        )


def _opening(prompt: Prompt, messages: tuple[dict[str, Any], ...], *, extends: bool) -> list[Message]:
    """What the first agent reads: the prompt, a plain one as a message of the user, and what the environment begins with."""
    asked: list[Message] = [dict(message) for message in prompt.messages]
    if not asked and (prompt.text or not messages):
        asked = [{"role": "user", "content": prompt.text}]
    if not (extends and asked and messages):
        return [*asked, *messages]
    last = {**asked[-1], "content": f"{asked[-1].get('content', '')}{messages[0]['content']}"}
    return [*asked[:-1], last, *messages[1:]]


def _shared(group: str, context: Tokens, prompt: Prompt) -> str:
    """The name of a key/value cache that all with the same context have in common."""
    if context is prompt.tokens or np.array_equal(context, prompt.tokens):
        return group
    return f"{group}/{hashlib.blake2b(context.tobytes(), digest_size=8).hexdigest()}"
