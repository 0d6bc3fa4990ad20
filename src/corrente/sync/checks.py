"""Which transport goes with which runtime and engine, and what each needs; refused before a model is loaded.

No torch, unless a transport asks for GPUs.
"""

from __future__ import annotations

from importlib.util import find_spec

from corrente.config import Embedded, Lora, RunConfig, schema
from corrente.config.rewards import SelfTeacherScorer
from corrente.errors import ConfigError
from corrente.models import devices
from corrente.sync.kinds import KINDS, Transport, address_of, transport_of

WILDCARDS = ("", "0.0.0.0", "::", "*")


def check(config: RunConfig) -> None:
    """Raise ConfigError, naming the key, its value and what is allowed."""
    transport = transport_of(config.sync)
    _check_runtime(config, transport)
    host = address_of(config.sync)
    if host in WILDCARDS:
        raise ConfigError(f"sync.host = {host!r}: give the one address where the engines reach the learner")
    _check_engine(config, transport)
    missing = [name for name in transport.packages if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f'sync.kind = "{transport.kind}" needs {", ".join(missing)}: pip install "corrente[{transport.extra}]"'
        )
    if asked := transport.gpus(config.sync):
        _check_gpus(config, transport, asked)
    _check_teacher(config, transport)


def _check_runtime(config: RunConfig, transport: Transport) -> None:
    runtime = schema.kind_of(config.runtime)
    if runtime not in transport.runtimes:
        kinds = " or ".join(f'"{other.kind}"' for other in KINDS.values() if runtime in other.runtimes)
        raise ConfigError(f'sync.kind = "{transport.kind}": runtime.kind = "{runtime}" needs sync.kind = {kinds}')


def _check_engine(config: RunConfig, transport: Transport) -> None:
    engine = schema.kind_of(config.engine)
    if transport.engines and engine not in transport.engines:
        kinds = " or ".join(f'"{name}"' for name in transport.engines)
        raise ConfigError(
            f'sync.kind = "{transport.kind}": engine.kind = "{engine}" cannot receive by it; it needs engine.kind = {kinds}, '
            "or another transport"
        )
    if isinstance(config.adapters, Lora) and not transport.ships_adapters:
        raise ConfigError(
            f'sync.kind = "{transport.kind}" ships whole checkpoints: with adapters.kind = "lora" another transport is '
            'needed, or adapters.kind = "lora_merged"'
        )


def _check_gpus(config: RunConfig, transport: Transport, asked: str) -> None:
    """NCCL needs a GPU for each member: a process group has no room for two members on one."""
    if config.model.device == "cpu":
        raise ConfigError(f'{asked} goes between GPUs: model.device = "cpu" must be "auto" or "cuda"')
    apart = transport.gpu_each and isinstance(config.engine, Embedded)
    devices.require_gpus(asked, at_least=1 + config.pool.replicas if apart else 1)


def _check_teacher(config: RunConfig, transport: Transport) -> None:
    """A collective would have to form another group for each version that a self-teacher is given, and another for the next."""
    mine = [at for at, scorer in enumerate(config.reward.scorers) if isinstance(scorer, SelfTeacherScorer)]
    if mine and not transport.serves_teacher:
        kinds = ", ".join(other.kind for other in KINDS.values() if other.serves_teacher)
        raise ConfigError(
            f'reward.scorers[{mine[0]}].kind = "self_teacher": it is brought each version after the engines have it, and '
            f'sync.kind = "{transport.kind}"; it must be one of {kinds}'
        )
