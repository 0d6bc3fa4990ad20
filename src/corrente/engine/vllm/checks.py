"""Refuse settings that engine.kind = "vllm" does not support, before a model is loaded. It starts nothing."""

from __future__ import annotations

from ipaddress import ip_address
from socket import gethostname
from urllib.parse import urlsplit

from corrente.config import (
    Barrier,
    Drain,
    Inline,
    Lora,
    OldWeights,
    Resume,
    RunConfig,
    Vllm,
    schema,
)
from corrente.engine.vllm import environment
from corrente.errors import ConfigError
from corrente.sync.kinds import address_of, transport_of


def check(config: RunConfig) -> None:
    """Raise ConfigError for a setting that vLLM does not support; it names the key, its value and what is allowed."""
    section = config.engine
    if not isinstance(section, Vllm):
        return
    if isinstance(config.runtime, Inline):
        raise ConfigError('engine.kind = "vllm": a server is a process of its own; it needs runtime.kind = "procs"')
    _check_inflight(config)
    flags = {argument.partition("=")[0].replace("_", "-") for argument in section.args}
    if environment.TRUST_FLAG in flags and not config.model.trust_remote_code:
        raise ConfigError(
            f"engine.args = {list(section.args)}: whether Python code of the model is run is one setting for all processes; set "
            f"model.trust_remote_code = true in place of {environment.TRUST_FLAG}"
        )
    if not section.urls:
        _check_recording(config, on_cpu=environment.find(section.python).on_cpu)
        return
    _check_recording(config, on_cpu=False)
    if section.python or section.args:
        key = "python" if section.python else "args"
        raise ConfigError(f"engine.{key} is for servers that are launched; with engine.urls it must be left out")
    if config.pool.replicas not in (1, len(section.urls)):
        raise ConfigError(
            f"pool.replicas = {config.pool.replicas}: each of engine.urls is a replica; leave it out, or say {len(section.urls)}"
        )
    for url in section.urls:
        _check_url(url, config)


def _check_recording(config: RunConfig, *, on_cpu: bool) -> None:
    """Check the recording of supports and experts: vLLM returns both on accelerators only, and supports only with a top_k."""
    if config.model.keep_routing and on_cpu:
        raise ConfigError(
            'model.keep_routing = true: vLLM says no experts on a CPU; leave it out, or engine.kind "embedded"'
        )
    if not environment.keeps_sets(config):
        return
    other = 'sampling.keep_support = false with staleness.correct, or engine.kind "embedded"'
    if on_cpu:
        raise ConfigError(
            f"sampling.keep_support = true: vLLM does not say on a CPU what it kept for a draw; use {other}"
        )
    if config.sampling.top_k == 0:
        raise ConfigError(
            f"sampling.top_k = 0: vLLM says what it kept for a draw only where top_k bounds it; give it (say 1000), or {other}"
        )
    warm = config.eval.temperature if config.eval.temperature is not None else float(config.eval.samples > 1)
    if config.eval.every and warm and not config.eval.top_k:
        raise ConfigError(
            "eval.top_k = 0: a vLLM server that says what it kept samples with a top_k, of held-out prompts too; give it, or "
            f"eval.temperature = 0 with eval.samples = 1, or {other}"
        )


def _check_inflight(config: RunConfig) -> None:
    """Check the inflight policy: all requests sample from one set of weights, but each keeps its own adapter to its end."""
    kind = schema.kind_of(config.inflight)
    if not isinstance(config.adapters, Lora):
        if isinstance(config.inflight, OldWeights):
            raise ConfigError(
                'inflight.kind = "snapshot": vLLM samples all requests from one set of weights; with engine.kind = "vllm" '
                "swap, recompute, resume, drain, barrier or cancel is allowed"
            )
        return
    if config.adapters.target_parameters:
        raise ConfigError(
            f"adapters.target_parameters = {list(config.adapters.target_parameters)}: vLLM adapts layers only; leave it out, "
            'or adapters.kind = "lora_merged"'
        )
    if not isinstance(config.inflight, OldWeights | Drain | Barrier | Resume):
        raise ConfigError(
            f'inflight.kind = "{kind}": with adapters.kind = "lora" vLLM lets a request finish under the adapter it began with; '
            'snapshot, drain, barrier or resume is allowed, or adapters.kind = "lora_merged"'
        )


def _check_url(url: str, config: RunConfig) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f'engine.urls: {url!r} given; "http://host:port" or "https://host:port" is allowed')
    if _is_this_host(parts.hostname):
        return
    transport, address = transport_of(config.sync), address_of(config.sync)
    if transport.shares_memory:
        raise ConfigError(
            f'sync.kind = "{transport.kind}": {url} is another host, without memory of the learner; disk, http or '
            "collective is allowed"
        )
    if address is not None and _is_this_host(address):
        raise ConfigError(
            f"sync.host = {address!r}: {url} is another host, which finds itself there; give the address of this one "
            "where it reaches the learner"
        )


def _is_this_host(host: str) -> bool:
    if host in ("localhost", gethostname()):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
