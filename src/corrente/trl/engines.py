"""Keys of engine, sampling and staleness: who generates, how tokens are drawn, and how far generation runs ahead."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from corrente.config import Limits
from corrente.errors import ConfigError
from corrente.trl.config import PASSED_ON

Writes = Iterable[tuple[str, Any]]

GENERATION = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids")},
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
}
"""Keys of generation_kwargs, and what they are in the section sampling."""
UNLIMITED_S = 1e9
"""TRL sets generation and evaluation no time; the watchdog still finds what hangs."""
HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")

WITH_HOST = ("http", "collective", "vllm_nccl")
"""sync.kind, where the engines are told where the learner is."""


def uses_vllm(args: Any) -> bool:
    """GRPOConfig: use_vllm. AsyncGRPOConfig: that, or an address of a server that was given."""
    return bool(args.use_vllm) or (
        args.asynchronous and args.is_set("vllm_server_base_url") and bool(args.vllm_server_base_url)
    )


def sampling(args: Any) -> Writes:
    """How tokens are drawn."""
    if args.max_completion_length is None:
        raise ConfigError("max_completion_length = None: give the largest number of tokens of a completion")
    yield "sampling.min_p", args.min_p or 0.0
    for name, value in (args.generation_kwargs or {}).items():
        if name not in GENERATION:
            raise ConfigError(f"generation_kwargs[{name!r}]: not supported; it may have {', '.join(GENERATION)}")
        yield (
            f"sampling.{GENERATION[name]}",
            [value] if GENERATION[name] == "stop" and isinstance(value, str) else value,
        )


def engine(args: Any) -> Writes:
    """The embedded engine; or vLLM, launched beside the learner or running already."""
    yield "limits.episode_s", UNLIMITED_S
    if not uses_vllm(args):
        yield "engine.kind", "embedded"
        tasks = getattr(args, "max_inflight_tasks", -1)
        if tasks != -1:
            yield "engine.max_sequences", tasks
        return
    yield "engine.kind", "vllm"
    yield "engine.start_deadline_s", args.vllm_server_timeout
    yield "engine.request_deadline_s", getattr(args, "request_timeout", UNLIMITED_S)
    if args.vllm_max_model_length is not None:
        yield "engine.max_context", args.vllm_max_model_length
    if args.vllm_mode == "server":
        yield from _attached(args)
    elif args.vllm_mode == "colocate":
        yield "engine.args", _launched(args)
    else:
        raise ConfigError(f"vllm_mode = {args.vllm_mode!r}: it must be 'server' or 'colocate'")


def _attached(args: Any) -> Writes:
    host = "127.0.0.1" if args.vllm_server_host == "0.0.0.0" else args.vllm_server_host
    url = args.vllm_server_base_url or f"http://{host}:{args.vllm_server_port}"
    for name in ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_model_impl"):
        if args.is_set(name):
            raise ConfigError(
                f"{name} = {getattr(args, name)!r}: with vllm_mode = 'server' it is for the command that starts it"
            )
    yield "engine.urls", [url]
    parts = urlsplit(url)
    if parts.hostname and parts.hostname not in HERE:
        yield "sync.kind", "http"
        kind = (getattr(args, PASSED_ON) or {}).get("sync.kind", "http")
        if kind in WITH_HOST and (facing := _local_address(parts.hostname)) is not None:
            yield "sync.host", facing


def _local_address(host: str) -> str | None:
    """Return this machine's address on the way to ``host``, to which nothing is sent; None where no way is known."""
    try:
        (family, kind, _, _, there), *_ = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as way:
            way.connect(there)
            return str(way.getsockname()[0])
    except OSError:
        return None


def _launched(args: Any) -> list[str]:
    return [
        *("--gpu-memory-utilization", str(args.vllm_gpu_memory_utilization)),
        *("--tensor-parallel-size", str(args.vllm_tensor_parallel_size)),
        *(("--model-impl", args.vllm_model_impl) if args.vllm_model_impl != "vllm" else ()),
    ]


def flow(args: Any, groups: int) -> Writes:
    """Alternating, in one process; or generation ahead by up to max_staleness versions, in strict order of admission."""
    if not args.asynchronous:
        yield "buffer.kind", "none"
        yield "runtime.kind", "procs" if uses_vllm(args) else "inline"
        return
    yield "runtime.kind", "procs"
    yield "sync.deadline_s", args.weight_sync_timeout
    yield "limits.watchdog_s", max(args.heartbeat_stale_after_s, Limits().watchdog_s)
    if args.max_staleness < 0:
        raise ConfigError(f"max_staleness = {args.max_staleness}: it must be at least 0")
    yield "staleness.max", args.max_staleness
    yield "buffer.kind", "window"
    yield "buffer.window", 1
