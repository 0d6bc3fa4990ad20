"""Whole runs of conversations under the virtual clock: environments answer slowly, and nothing else waits for them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import anyio
import msgspec
import pytest
from tests.unit.talking import CharTokenizer

from corrente.common.threads import inline
from corrente.config import Cancel, Checkpoint, Limits, Resume, RunConfig, Swap
from corrente.config.env import Environments
from corrente.env.chat_renderer import ChatRenderer
from corrente.env.conversation import Conversation, EnvSetup
from corrente.env.environment import Observation
from corrente.env.instance import EnvInstance
from corrente.env.pool import InstancePool
from corrente.errors import FailureBudgetError
from corrente.sim.distributions import Distribution, Fixed, Uniform, generator
from corrente.testing import Simulation, World, run_virtual
from corrente.testing.world import build, flow, play

LIMITS = Limits(episode_s=1000.0)
NO_WAIT = Fixed(0.0)


class Host:
    """Asks ``turns`` times, ``wait_s`` apart; what it says depends on its task, its seed and what it was told."""

    def __init__(self, town: Town) -> None:
        self._town = town
        self._turns, self._row, self._rng = 0, 0, generator(0)
        self.closed = False

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
        self._turns, self._row, self._rng = 0, int(task["row"]), generator(seed)
        return Observation(messages=({"role": "user", "content": f"row {task['row']}"},))

    async def step(self, message: Mapping[str, Any]) -> Observation:
        await anyio.sleep(self._town.wait_s.draw(self._rng))
        self._turns += 1
        if self._row in self._town.broken:
            raise ValueError("the host has left")
        again = ({"role": "user", "content": f"{self._turns}, {len(message['content'])}"},)
        return Observation(messages=again, reward=0.5, done=self._turns == self._town.turns)

    async def close(self) -> None:
        self.closed = True


class Town:
    """Where hosts live."""

    def __init__(
        self, *, wait_s: Distribution = NO_WAIT, turns: int = 3, broken: tuple[int, ...] = (), limit: int = 0
    ) -> None:
        self.wait_s, self.turns, self.broken, self.limit = wait_s, turns, broken, limit
        self.hosts: list[Host] = []

    def env(self, config: RunConfig) -> tuple[Conversation, InstancePool]:
        async def make() -> EnvInstance:
            self.hosts.append(Host(self))
            return EnvInstance(self.hosts[-1], functions=(), offload=inline, deadline_s=500.0)

        pool = InstancePool(make, limit=self.limit)
        tokenizer = CharTokenizer()
        setting = EnvSetup(pool=pool, renderer=ChatRenderer(tokenizer, tokenizer))
        rules = Environments(max_turns=9)
        return Conversation({"": setting}, sampling=config.sampling, rules=rules, context=1 << 20), pool


def run(config: RunConfig, world: World, town: Town, **how: Any) -> Simulation:
    async def main() -> Simulation:
        simulation = build(config, world, resume=how.get("resume"))
        env, pool = town.env(config)
        simulation.parts = msgspec.structs.replace(simulation.parts, env=env, eval_env=env)
        try:
            return await play(simulation, **how)
        finally:
            await pool.close()

    return run_virtual(main, limit_s=1e6)


def lengths(request: Any) -> float:
    return 5 + (7 * len(request.tokens) + request.seed % 11) % 40


def test_environments_answer_beside_generation_and_training() -> None:
    """Every episode waits 30 s for its host, a step takes 4 s: with enough groups in flight the run is as long as its steps."""
    town = Town(wait_s=Fixed(10.0))
    world = World(lengths=Fixed(5), step_s=Fixed(4.0))
    done = run(flow(steps=40, prompts=2, ahead=12, window=8), world, town)
    assert done.counts["trained"] == 80
    alone_s = 40 * (4.0 + 30.0 + 3 * 0.5)
    assert done.elapsed_s < 0.2 * alone_s
    assert done.elapsed_s < 40 * 4.0 / 0.75
    assert len(town.hosts) <= 2 * 2 * 13
    assert all(host.closed for host in town.hosts)


@pytest.mark.parametrize("landing", [Swap(), Resume()], ids=lambda landing: type(landing).__name__)
def test_stopped_run_of_conversations_generates_no_token_twice(landing: Any) -> None:
    """Environments are played again from their start, on instances of the next process, and the record answers the policy."""
    config = flow(steps=1000, ahead=2, window=1, limits=LIMITS, checkpoint=Checkpoint(every=0), inflight=landing)
    world = World(lengths=lengths, rows=24)
    town = Town(wait_s=Uniform(low=0.1, high=1.0))
    whole = run(config, world, town)
    parts = [run(config, world, town, stop_at_s=4.0)]
    for at_s in (3.0, 6.1):
        parts.append(run(config, world, town, resume=parts[-1].checkpoints.read(), stop_at_s=at_s))
    parts.append(run(config, world, town, resume=parts[-1].checkpoints.read()))
    assert sum(part.engine_stats.decode_tokens for part in parts) == whole.engine_stats.decode_tokens
    trained = [entry.prompt_id for part in parts for entry in part.consumed]
    assert sorted(trained) == sorted(f"0/{row}" for row in range(24))
    carried = [u for u in parts[0].checkpoints.read()[0].unfinished for record in u.answers if len(record) > 1]
    assert carried
    assert all(host.closed for host in town.hosts)


def test_episode_whose_environment_fails_is_lost_and_counted() -> None:
    town = Town(broken=(1, 4), limit=3)
    done = run(flow(steps=1000, prompts=1, ahead=2, limits=LIMITS), World(lengths=lengths, rows=12), town)
    assert (done.counts["trained"], done.counts["failed"]) == (10, 2)
    assert all(host.closed for host in town.hosts)


def test_environment_that_always_fails_ends_the_run_by_name() -> None:
    town = Town(broken=tuple(range(1000)))
    config = flow(steps=1000, limits=Limits(episode_s=1000.0, failure_window=8))
    done = run(config, World(lengths=lengths), town)
    assert isinstance(done.error, FailureBudgetError)
    assert "the host has left" in str(done.error)
    assert all(host.closed for host in town.hosts)


def test_groups_given_up_leave_no_instance_open() -> None:
    town = Town(wait_s=Uniform(low=0.5, high=8.0))
    done = run(flow(steps=20, ahead=3, window=6, inflight=Cancel(max_age=1)), World(lengths=lengths), town)
    assert done.counts["cancelled"] > 3
    assert done.counts["trained"] == 40
    assert all(host.closed for host in town.hosts)


def test_late_episodes_end_by_their_deadline_and_their_instances_are_closed() -> None:
    town = Town(wait_s=Uniform(low=1.0, high=20.0), limit=12)
    config = flow(steps=6, ahead=3, window=6, limits=Limits(episode_s=45.0, failure_fraction=1.0))
    done = run(config, World(lengths=lengths), town)
    assert done.counts["trained"] == 12
    assert done.counts["failed"] > 0
    assert all(host.closed for host in town.hosts)


def test_killed_run_goes_on_in_the_middle_of_its_conversations() -> None:
    config = flow(steps=1000, ahead=2, window=1, limits=LIMITS, checkpoint=Checkpoint(every=2))
    world, town = World(lengths=lengths, rows=20), Town(wait_s=Uniform(low=0.1, high=1.0))
    first = run(config, world, town, kill_at_s=14.0)
    second = run(config, world, town, resume=first.checkpoints.read())
    snapshot, _ = first.checkpoints.read()
    before = [e.prompt_id for e in first.consumed if e.step < snapshot.step]
    assert sorted(before + [e.prompt_id for e in second.consumed]) == sorted(f"0/{row}" for row in range(20))
    ages = [entry.age for entry in itertools.chain(first.consumed, second.consumed)]
    assert max(ages) <= 2
