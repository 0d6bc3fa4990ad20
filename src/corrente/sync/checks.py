"""Which transport goes with which runtime, and what each needs; refused before a model is loaded. No torch, unless it is asked
for GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from corrente.config import Collective, CudaIpc, Embedded, Http, Lora, RunConfig, Vllm, VllmNccl
from corrente.errors import ConfigError
from corrente.models import devices

TRANSPORTS: Mapping[str, tuple[str, ...]] = {
    "inline": ("inproc",),
    "procs": ("shm", "disk", "http", "collective", "vllm_nccl", "cuda_ipc"),
}
"""sync.kind by runtime.kind; the first is the default."""
HTTP_NEEDS = ("httpx2", "starlette", "uvicorn")
WILDCARDS = ("", "0.0.0.0", "::", "*")


def check(config: RunConfig) -> None:
    """Raise ConfigError, naming the key, its value and what is allowed."""
    runtime, kind = (section.__struct_config__.tag for section in (config.runtime, config.sync))
    allowed = TRANSPORTS[str(runtime)]
    if kind not in allowed:
        kinds = " or ".join(f'"{name}"' for name in allowed)
        raise ConfigError(f'sync.kind = "{kind}": runtime.kind = "{runtime}" needs sync.kind = {kinds}')
    match config.sync:
        case Http(host=host):
            _check_host(host)
            missing = [name for name in HTTP_NEEDS if find_spec(name) is None]
            if missing:
                raise ConfigError(f'sync.kind = "http" needs {", ".join(missing)}: pip install "corrente[http]"')
        case Collective(host=host, backend=backend):
            _check_host(host)
            if backend == "nccl":
                _check_gpus(config, 'sync.backend = "nccl"')
        case VllmNccl(host=host):
            _check_host(host)
            _check_for_vllm(config)
            _check_gpus(config, 'sync.kind = "vllm_nccl"')
        case CudaIpc():
            _check_gpus(config, 'sync.kind = "cuda_ipc"')
        case _:
            return


def _check_host(host: str) -> None:
    if host in WILDCARDS:
        raise ConfigError(f"sync.host = {host!r}: give the one address where the engines reach the learner")


def _check_for_vllm(config: RunConfig) -> None:
    """vLLM's own engine loads whole checkpoints, in place."""
    if not isinstance(config.engine, Vllm):
        raise ConfigError(
            'sync.kind = "vllm_nccl" is a door of vLLM\'s: it needs engine.kind = "vllm"; collective is for all'
        )
    if isinstance(config.adapters, Lora):
        raise ConfigError(
            'sync.kind = "vllm_nccl" ships whole checkpoints: with adapters.kind = "lora" another transport is needed, '
            'or adapters.kind = "lora_merged"'
        )


def _check_gpus(config: RunConfig, asked: str) -> None:
    """Between GPUs, and by NCCL between different ones: a process group has no room for two members on one."""
    if config.model.device == "cpu":
        raise ConfigError(f'{asked} goes between GPUs: model.device = "cpu" must be "auto" or "cuda"')
    apart = isinstance(config.sync, Collective) and isinstance(config.engine, Embedded)
    devices.require_gpus(asked, at_least=1 + config.pool.replicas if apart else 1)
