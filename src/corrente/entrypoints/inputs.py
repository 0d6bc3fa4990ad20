"""What a caller brings as Python objects, in place of what a config can only name.

A config that was read from a file is whole without it. ``corrente.trl``, notebooks and tests hand over functions, datasets and
environments; ``assemble`` passes each to the stage it belongs to, where it replaces what the config says there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from corrente.env.base import Env


class RunInputs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Nothing given, nothing replaced. Objects stay in this process, so none of them has to be picklable."""

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
    "environment" of a prompt says which."""
    env: Env | None = None
    """How a prompt is played, whole; tools and environment_factory must be empty then."""

    def env_objects(self) -> dict[str, Any]:
        """The objects that say how prompts are played, as keyword arguments of the env stage."""
        return {"tools": self.tools, "environment_factory": self.environment_factory, "env": self.env}


NO_INPUTS = RunInputs()
"""A run that its config says whole."""
