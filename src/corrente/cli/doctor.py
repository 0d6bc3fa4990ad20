"""`corrente doctor`: lists what this machine can run, and the exact command that adds what is missing.

Installs nothing, and uses no network.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from corrente.engine.vllm import environment
from corrente.errors import ConfigError
from corrente.models import cache as model_cache


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line: the subject, what was found, ``fine`` unless something is missing, and the command that adds it."""

    subject: str
    found: str
    fine: bool = True
    remedy: str = ""


EXTRAS = {
    "gguf": (("gguf", "accelerate"), "convert the models that `corrente fetch` gets"),
    "lora": (("peft",), "train adapters: adapters.kind lora and lora_merged"),
    "test": (("pytest", "hypothesis"), "run corrente's own tests"),
}


def examine() -> Iterator[Finding]:
    """All findings, those that are cheap to make first."""
    yield _python()
    yield from _packages()
    yield _machine()
    yield from _devices()
    yield from _models()
    yield from _extras()
    yield _vllm()


def _python() -> Finding:
    version = platform.python_version()
    fine = sys.version_info >= (3, 11)
    return Finding(
        subject="python", found=version, fine=fine, remedy="" if fine else "corrente needs Python 3.11 or later"
    )


def _packages() -> Iterator[Finding]:
    for name in ("corrente", "torch", "transformers", "safetensors", "anyio"):
        version = _version(name)
        remedy = "" if version else f"pip install {name}"
        yield Finding(subject=name, found=version or "not installed", fine=bool(version), remedy=remedy)


def _machine() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = [f"{platform.machine()}, {cores} cores"]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        parts.append(f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB of memory")
    parts.append(f"{shutil.disk_usage(Path.cwd()).free / 2**30:.0f} GiB free here")
    return Finding(subject="machine", found=", ".join(parts))


def _devices() -> Iterator[Finding]:
    if not _version("torch"):
        return
    import torch  # heavy: only this command, and only to ask

    if not torch.cuda.is_available():
        yield Finding(subject="device", found="cpu, in float32 (torch sees no accelerator)")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        yield Finding(subject=f"device {index}", found=f"{properties.name}, {memory}, {dtype}")


def _models() -> Iterator[Finding]:
    for name in model_cache.KNOWN_MODELS:
        home = model_cache.cached_model(name)
        remedy = "" if home else f"corrente fetch {name}"
        yield Finding(subject=name, found=str(home) if home else "not fetched", fine=bool(home), remedy=remedy)


def _extras() -> Iterator[Finding]:
    for extra, (packages, use) in EXTRAS.items():
        missing = [package for package in packages if not _version(package)]
        found = f"{use}: {'ready' if not missing else 'without ' + ', '.join(missing)}"
        remedy = f"pip install 'corrente[{extra}]'" if missing else ""
        yield Finding(subject=f"extra {extra}", found=found, fine=not missing, remedy=remedy)


def _vllm() -> Finding:
    """The engine of another environment; whether it starts is not tried."""
    try:
        found = environment.find()
    except ConfigError:
        torch = sys.modules.get("torch")
        command = environment.remedy(accelerator=torch is not None and torch.cuda.is_available())
        return Finding(subject="engine vllm", found="serve with vLLM: no environment", fine=False, remedy=command)
    tested = found.version.startswith(environment.VERSION)
    note = "" if tested else f", written for {environment.VERSION}"
    return Finding(
        subject="engine vllm",
        found=f"serve with vLLM: {found.package} {found.version} in {found.python}{note}",
        fine=tested,
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
