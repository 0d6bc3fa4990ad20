"""Conformance suites for everything you may replace, and a clock that jumps.

``check_<protocol>(make, ...)`` holds an implementation to the contract in the docstring of its Protocol, and fails with a
``ContractError`` that begins with the broken clause. Those that are async run under asyncio and under trio alike;
``run_virtual`` runs them, or anything else, in virtual time, decided by a seed; ``simulate(config, world)`` runs the whole
pipeline so. ``samples`` builds small valid prompts, episodes, groups, rows and configs.
See docs/how-to/write-an-implementation.md.
"""

from corrente.testing import samples
from corrente.testing.algorithms import check_estimator, check_filter, check_objective
from corrente.testing.buffers import check_buffer
from corrente.testing.clock import run_virtual
from corrente.testing.engines import EngineCase, check_engine
from corrente.testing.expect import ContractError
from corrente.testing.policies import check_inflight, check_staleness
from corrente.testing.spawners import SpawnerCase, check_spawner
from corrente.testing.stages import check_env, check_prompts, check_scorer, check_sink
from corrente.testing.workers import LearnerCase, SyncCase, check_learner, check_sync
from corrente.testing.world import Simulation, World, simulate

__all__ = [
    "ContractError",
    "EngineCase",
    "LearnerCase",
    "Simulation",
    "SpawnerCase",
    "SyncCase",
    "World",
    "check_buffer",
    "check_engine",
    "check_env",
    "check_estimator",
    "check_filter",
    "check_inflight",
    "check_learner",
    "check_objective",
    "check_prompts",
    "check_scorer",
    "check_sink",
    "check_spawner",
    "check_staleness",
    "check_sync",
    "run_virtual",
    "samples",
    "simulate",
]
