"""Objects that a program hands over in place of what a config can only name.

A config that was read from a file is complete without them. ``train``, ``evaluate`` and the trainers of ``corrente.trl`` take
functions, datasets and environments; ``assemble`` passes each to its stage, where it replaces what the config names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from corrente.config import RunConfig
from corrente.config.env import Environments
from corrente.env.base import Env
from corrente.prompts.build import prompts_section


class RunInputs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Objects of one run; a field that is left out replaces nothing. They stay in this process: none has to be picklable."""

    reward_functions: Sequence[Callable[..., Any]] = ()
    """Replace reward.functions; weights are reward.weights."""
    train_dataset: Any = None
    """Replaces the source of ``prompts``: a datasets.Dataset or IterableDataset, a sequence or an iterable of dicts, or a
    function that returns one. Epochs and order are those ``prompts`` says."""
    eval_dataset: Any = None
    """Held-out prompts, likewise; or several of them, by name."""
    tools: Sequence[Callable[..., Any]] = ()
    """Functions the policy may call; with type hints and a docstring that describes each argument."""
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None
    """Makes the environment of an episode: of the Environment protocol, or a class of TRL's shape. Several by name: the column
    "environment" of a prompt names one."""
    env: Env | None = None
    """Plays a whole prompt; tools and environment_factory must be empty then."""

    def env_objects(self) -> dict[str, Any]:
        """The objects that decide how prompts are played, as keyword arguments of the env stage."""
        return {"tools": self.tools, "environment_factory": self.environment_factory, "env": self.env}

    @property
    def environment_names(self) -> frozenset[str] | None:
        """The names that rows choose their environment by; None where there are not several."""
        return frozenset(self.environment_factory) if isinstance(self.environment_factory, Mapping) else None

    def environment_opens(self, config: RunConfig) -> bool:
        """True if an environment brings the first messages, so that a row may be without a prompt."""
        return self.environment_factory is not None or isinstance(config.env, Environments)


NO_INPUTS = RunInputs()
"""For a run whose config is complete."""


def recorded_config(config: RunConfig, inputs: RunInputs) -> RunConfig:
    """``config`` without the names that ``inputs`` replace, as the run's folder records it.

    Later commands on the folder then ask for the objects, and do not silently use what the run did not.
    """
    if inputs.train_dataset is not None:
        config = msgspec.structs.replace(config, prompts=prompts_section(config, inputs.train_dataset))
    if inputs.reward_functions:
        config = msgspec.structs.replace(config, reward=msgspec.structs.replace(config.reward, functions=()))
    return config
