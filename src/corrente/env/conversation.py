"""Plays a prompt as a conversation: turns of the policy, and between them the answers of tools and of an environment.

turn       ends the episode where it is cut by length; flagged, and nobody answers it
its calls  answered by tools, all of a turn at once                                           -> messages, the next turn
no calls   answered by the environment, or the end where there is none                        -> messages, reward, who is next
end        the environment is done, ``max_turns`` are taken, or no token is left of ``max_total_tokens`` or the context

Each agent has a dialogue of its own, which begins with the first messages to it; the first agent also reads the prompt. Tokens
of prompts, tools and environments are context, never trained. The members of a group play the same task: the seed of ``reset``
is the prompt's. An episode that is cut before its environment gave any reward earns 0 from it, or an endless one would cost
nothing. A resumed run plays an episode again: the policy's turns come from the record, tools and environments are called again.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from corrente.config.env import EnvRules
from corrente.data.messages import content_text
from corrente.data.types import Completion, Prompt, Request, Sampling, StepScore, Tokens, Turn
from corrente.env.base import Generate, PlayedEpisode
from corrente.env.chat_renderer import ChatRenderer
from corrente.env.dialogue import Dialogue, SampledTurn
from corrente.env.environment import Observation
from corrente.env.instance import EnvInstance
from corrente.env.pool import InstancePool
from corrente.errors import GenerationError, RolloutError
from corrente.prompts.base import ENVIRONMENT_COLUMN, NO_PROMPT, Message


class EnvSetup(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One environment: the pool of its instances, and the renderer that knows its tools."""

    pool: InstancePool
    renderer: ChatRenderer


class Conversation:
    """Implements Env. ``setups``: by the name that a prompt has in its column "environment"; one, called "", is for all.
    ``context``: tokens the engine takes, of prompt and completion together. ``shown``: reward functions look at what an episode
    was played in, which stays as it is until they have."""

    def __init__(
        self,
        setups: Mapping[str, EnvSetup],
        *,
        sampling: Sampling,
        rules: EnvRules,
        context: int,
        seed: int = 0,
        shown: bool = True,
    ) -> None:
        self._setups, self._sampling, self._rules = setups, sampling, rules
        self._context, self._seed, self._shown = context, seed, shown

    async def play(self, prompt: Prompt, generate: Generate, *, key: str, group: str, seed: int) -> PlayedEpisode:
        setup = self._setup_for(prompt)
        instance = await setup.pool.acquire()
        try:
            played = await _EpisodeRun(
                self, setup.renderer, instance, prompt, generate, key=key, group=group, seed=seed
            ).run()
        except BaseException:
            await setup.pool.discard(instance)
            raise
        setup.pool.end_episode(instance)
        if not self._shown:
            await setup.pool.release(instance)
            return played

        async def release() -> None:
            await setup.pool.release(instance)

        return msgspec.structs.replace(played, environment=instance.exposed, release=release)

    def environment_task(self, prompt: Prompt) -> tuple[dict[str, Any], int]:
        """A prompt's task for its environment: a copy of its columns, and the seed that its whole group shares."""
        digest = hashlib.blake2b(f"{self._seed}/{prompt.id}".encode(), digest_size=4).digest()
        several = "" not in self._setups
        columns = {name: value for name, value in prompt.fields.items() if not (several and name == ENVIRONMENT_COLUMN)}
        return copy.deepcopy(columns), int.from_bytes(digest, "little")

    def next_sampling(self, dialogue: Dialogue) -> Sampling | None:
        """Sampling of the next turn, with its token budget; None where no token is left."""
        room = self._context - len(dialogue.context) if dialogue.after_opening else self._sampling.max_tokens
        if self._rules.max_total_tokens:
            room = min(room, self._rules.max_total_tokens - dialogue.tokens_spent)
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
        return self._setups

    def _setup_for(self, prompt: Prompt) -> EnvSetup:
        name = "" if "" in self._setups else str(prompt.fields.get(ENVIRONMENT_COLUMN, ""))
        if name not in self._setups:
            known = ", ".join(map(repr, self._setups))
            raise RolloutError(
                f"prompt {prompt.id}: its column {ENVIRONMENT_COLUMN!r} is {name!r}; it must be one of {known}"
            )
        return self._setups[name]


class _EpisodeRun:
    """One episode while it is played."""

    def __init__(
        self,
        env: Conversation,
        renderer: ChatRenderer,
        instance: EnvInstance,
        prompt: Prompt,
        generate: Generate,
        *,
        key: str,
        group: str,
        seed: int,
    ) -> None:
        self._env, self._renderer, self._instance, self._prompt = env, renderer, instance, prompt
        self._generate, self._key, self._group, self._seed = generate, key, group, seed
        self._turns: list[Turn] = []
        self._messages: list[dict[str, Any]] = []
        self._dialogues: dict[str, Dialogue] = {}
        self._taken = 0
        self._cut = False
        self._counts: Counter[str] = Counter({"calls": 0, "failures": 0} if instance.functions else {})
        self._steps: list[StepScore] = []
        self._earned: dict[str, float] = {}
        self._given: dict[str, float] = {}
        self._info: dict[str, Any] = {}

    async def run(self) -> PlayedEpisode:
        columns, seed = self._env.environment_task(self._prompt)
        observation = await self._instance.reset(columns, seed=seed)
        self._record_rewards(observation)
        while not observation.done and self._taken < self._env.rules.max_turns:
            agent = observation.agent
            dialogue = self._next_dialogue(observation)
            sampling = self._env.next_sampling(dialogue)
            if sampling is None:
                self._cut = True
                break
            completion = await self._sample(dialogue, sampling)
            sampled = dialogue.add_sampled_turn(completion)
            self._taken += 1
            self._messages.append(sampled.message)
            if completion.finish_reason == "length":
                self._cut = True
                break
            observation = await self._answer(agent, sampled)
            self._credit_turn(agent, sampled, observation)
        return self._finish_episode(await self._instance.final_reward())

    def _next_dialogue(self, observation: Observation) -> Dialogue:
        """The dialogue of the agent whose turn is next, with the new messages added; made at the agent's first turn."""
        agent, messages = observation.agent, observation.messages
        if agent in self._dialogues:
            self._dialogues[agent].add_messages(messages)
            return self._dialogues[agent]
        first = not self._dialogues
        opening = (
            opening_messages(self._prompt, messages, extends=self._instance.extends_prompt) if first else list(messages)
        )
        self._dialogues[agent] = Dialogue(
            self._renderer,
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
            group=_cache_group(self._group, dialogue.context, self._prompt) if fresh else "",
        )
        completion = await self._generate(request)
        if completion.finish_reason == "abort":
            raise GenerationError(f"request {request.id} was aborted after {len(completion.tokens)} tokens")
        return completion

    async def _answer(self, agent: str, sampled: SampledTurn) -> Observation:
        if sampled.calls:
            answers, counts = await self._instance.call_tools(sampled.calls)
            self._counts.update(counts)
            return Observation(messages=tuple(answers), agent=agent)
        return await self._instance.step(sampled.message)

    def _credit_turn(self, agent: str, sampled: SampledTurn, observation: Observation) -> None:
        self._messages += [dict(message) for message in observation.messages]
        self._record_rewards(observation)
        if observation.reward is not None:
            self._earned[agent] = self._earned.get(agent, 0.0) + observation.reward
            self._steps.append(StepScore(sampled.turn, 0, len(self._turns[sampled.turn].tokens), observation.reward))

    def _record_rewards(self, observation: Observation) -> None:
        for agent, reward in observation.rewards.items():
            self._given[agent] = self._given.get(agent, 0.0) + reward
        self._info.update(observation.info)

    def _finish_episode(self, outcome: float | None) -> PlayedEpisode:
        several = len(self._dialogues) > 1 or bool(self._given)
        nothing = 0.0 if self._cut and self._instance.rewards_steps else None
        earned = None if several else sum(self._earned.values()) if self._earned else nothing
        if outcome is not None:
            earned = outcome + (earned or 0.0)
        judged = {**self._earned, **self._given, **({} if nothing is None else self._dialogues)}
        agents = {a: self._earned.get(a, 0.0) + self._given.get(a, 0.0) for a in judged}
        numbers = {name: float(value) for name, value in self._info.items() if _is_number(value)}
        first = next(iter(self._dialogues.values()), None)
        return PlayedEpisode(
            turns=tuple(self._turns),
            opening=first.opening_text if first else "",
            messages=tuple(self._messages),
            rewards={self._instance.name: earned} if earned is not None else {},
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


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def opening_messages(prompt: Prompt, messages: tuple[dict[str, Any], ...], *, extends: bool) -> list[Message]:
    """Messages that the first agent reads: the prompt (plain text as a user message), then the environment's first messages."""
    asked: list[Message] = [dict(message) for message in prompt.messages]
    if not asked and (prompt.text or not messages):
        asked = [{"role": "user", "content": prompt.text}]
    if messages and not extends and asked == list(NO_PROMPT):
        asked = []
    if not (extends and asked and messages):
        return [*asked, *messages]
    last = {**asked[-1], "content": f"{content_text(asked[-1].get('content'))}{content_text(messages[0]['content'])}"}
    return [*asked[:-1], last, *messages[1:]]


def _cache_group(group: str, context: Tokens, prompt: Prompt) -> str:
    """Name of the key/value cache that all requests with this context share."""
    if context is prompt.tokens or np.array_equal(context, prompt.tokens):
        return group
    return f"{group}/{hashlib.blake2b(context.tobytes(), digest_size=8).hexdigest()}"
