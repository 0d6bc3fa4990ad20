"""One question to the planner: what is trained, on what, and how."""

from __future__ import annotations

import re

import msgspec

from corrente.errors import ConfigError
from corrente.plan.devices import Device, find_device
from corrente.plan.lengths import Lengths
from corrente.plan.models import ModelShape
from corrente.sim.distributions import Distribution, Fixed


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A model on devices, with a batch, lengths and delays.

    ``prompts`` x ``group`` completions a step, of prompts of ``prompt_tokens``. ``turns`` completions in a row, ``tool_s`` apart.
    ``reward_s``: seconds that the rewards of a group take. ``minibatches``: optimizer updates a step. ``logprob_passes``: forward
    passes of the learner beside forward and backward, of a reference model or of recomputed log-probs. ``recompute``: activations
    are computed again in the backward pass.
    ``max_sequences``: that an engine decodes at once. ``slots``: versions of the weights that an engine holds while one arrives.
    ``price``: of a device and hour.
    """

    model: ModelShape
    device: Device
    devices: int
    prompts: int = 64
    group: int = 8
    prompt_tokens: int = 512
    lengths: Lengths = Lengths(mean=1024, tail=4096, maximum=8192)
    turns: int = 1
    tool_s: Distribution = Fixed(0.0)
    reward_s: Distribution = Fixed(0.0)
    minibatches: int = 1
    logprob_passes: int = 0
    recompute: bool = True
    max_sequences: int = 256
    slots: int = 2
    price: float = 0.0
    seed: int = 0


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """How the devices are used.

    ``generating`` devices hold engines of ``tensor_parallel`` devices each, ``training`` devices the learner. ``colocated``: the
    same devices do both in turns. ``ahead``: versions that generation may run ahead (S); 0: synchronous.
    """

    generating: int
    training: int
    tensor_parallel: int = 1
    ahead: int = 1
    colocated: bool = False

    @property
    def replicas(self) -> int:
        return self.generating // self.tensor_parallel

    @property
    def label(self) -> str:
        if self.colocated:
            return "synchronous, shared GPUs"
        return {0: "synchronous, split", 1: "one version ahead"}.get(self.ahead, f"{self.ahead} versions ahead")


GPUS = re.compile(r"^(\d+)\s*x\s*(.+)$", re.IGNORECASE)


def parse_gpus(text: str, device: Device | None = None) -> tuple[int, Device]:
    """The number and kind of "64xH100". ``device`` takes the place of the named kind. ConfigError for anything else."""
    match = GPUS.match(text.strip())
    if match is None or not int(match[1]):
        raise ConfigError(f'--gpus {text!r}: it must be a number and a kind, such as "64xH100"')
    return int(match[1]), device or find_device(match[2])


def parse_split(text: str, devices: int) -> tuple[int, int]:
    """Devices that generate and that train, of "32:32". ConfigError when they are not all devices."""
    match = re.match(r"^(\d+):(\d+)$", text.strip())
    if match is None:
        raise ConfigError(f'--split {text!r}: it must be GENERATING:TRAINING, such as "{devices // 2}:{devices // 2}"')
    generating, training = int(match[1]), int(match[2])
    if not generating or not training or generating + training > devices:
        raise ConfigError(f"--split {text!r}: both must be at least 1, and at most {devices} together")
    return generating, training
