"""Says what a run began with: model, adapter and data files, by what is in them and not by where they lie.

    inputs.json    in the run folder, written when the run begins; a resumed run compares it with what it is given

A model is its config, its weights tensor by tensor, and its tokenizer. What libraries write anew at each save, such as their
version, is left out; so are keys and tensors that only one side has, for saving a model adds defaults and drops tied weights.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from corrente.config import Full, RunConfig
from corrente.errors import ConfigError
from corrente.models import cache as model_cache

INPUTS = "inputs.json"
WHOLE_BYTES = 4 << 30
"""A file up to this size is read whole; of a larger one, a block of BLOCK_BYTES in every 16."""
BLOCK_BYTES = 1 << 20
WRITTEN_BY_LIBRARIES = ("transformers_version", "dtype", "torch_dtype", "use_cache")
"""Keys of a config that say nothing about the model."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token")
TOKENIZER_PARTS = ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")
VOCABULARY_FILES = ("vocab.*", "merges.txt", "*.model")


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """``config``: of config.json. ``weights``: a digest per tensor. ``tokenizer``: a digest, or the text, per part of it."""

    config: dict[str, Any] = {}
    weights: dict[str, str] = {}
    tokenizer: dict[str, str] = {}

    def difference(self, now: ModelIdentity) -> str:
        """What tells ``now`` from this model, the run's; empty when nothing does."""
        for key, value in self.config.items():
            if key in now.config and now.config[key] != value:
                return f"its config has {key} = {now.config[key]!r}, and the run's model has {value!r}"
        for name, digest in self.tokenizer.items():
            if name in now.tokenizer and now.tokenizer[name] != digest:
                return f"its tokenizer has another {name} than the run's"
        common = self.weights.keys() & now.weights.keys()
        if self.weights and now.weights and not common:
            return f"it has no tensor {next(iter(self.weights))!r}, as the run's model has"
        other = sorted(name for name in common if self.weights[name] != now.weights[name])
        return f"{len(other)} of its {len(common)} tensors differ from the run's, such as {other[0]!r}" if other else ""


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a run began with. ``files``: by key of the config, a digest of the file, or of the files of the folder, it names."""

    model: ModelIdentity | None = None
    files: dict[str, str] = {}


def identify(config: RunConfig) -> RunIdentity:
    """What ``config`` names, as far as it is there."""
    try:
        model = identify_model(model_cache.resolve_model(config.model.path))
    except ConfigError:  # judged where the model is loaded
        model = None
    named = {f"prompts.{key}": getattr(config.prompts, key, "") for key in ("path", "eval_path")}
    named["adapters.init"] = "" if isinstance(config.adapters, Full) else config.adapters.init
    named["chat.template"] = "" if "{" in config.chat.template else config.chat.template
    found = {key: _digest_place(Path(place)) for key, place in named.items() if place}
    return RunIdentity(model=model, files={key: digest for key, digest in found.items() if digest})


def identify_model(folder: Path) -> ModelIdentity:
    """What the model in ``folder`` is."""
    config = _read_json(folder / "config.json")
    return ModelIdentity(
        config={key: value for key, value in config.items() if key[:1] != "_" and key not in WRITTEN_BY_LIBRARIES},
        weights=_identify_weights(folder),
        tokenizer=_identify_tokenizer(folder),
    )


def write_identity(folder: Path, identity: RunIdentity) -> None:
    """Record the identity in a run folder."""
    (folder / INPUTS).write_bytes(msgspec.json.format(msgspec.json.encode(identity), indent=1))


def read_identity(folder: Path) -> RunIdentity | None:
    """The identity that a run folder has; None where it has none."""
    try:
        return msgspec.json.decode((folder / INPUTS).read_bytes(), type=RunIdentity)
    except (OSError, msgspec.DecodeError):
        return None


def _identify_weights(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stat = file.stat()
        try:
            found |= _tensor_digests(file, stat.st_mtime_ns, stat.st_size)
        except (OSError, ValueError, KeyError, TypeError):  # a broken file is refused where it is loaded
            return {}
    return found or {file.name: _digest_file(file) for file in sorted(folder.glob("*.bin"))}


@functools.lru_cache(maxsize=64)
def _tensor_digests(file: Path, changed_ns: int, size: int) -> Mapping[str, str]:
    """A digest of each tensor of a safetensors file. ``changed_ns`` and ``size`` tell one state of the file from another."""
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin = 8 + int.from_bytes(data[:8], "little")
        header: dict[str, Any] = json.loads(data[8:begin])
        header.pop("__metadata__", None)
        with memoryview(data) as view:
            digests: dict[str, str] = {}
            for name, entry in header.items():
                start, stop = entry["data_offsets"]
                with view[begin + start : begin + stop] as tensor:
                    digests[name] = f"{entry['dtype']} {_digest_bytes(tensor, whole=size <= WHOLE_BYTES)}"
            return digests


def _identify_tokenizer(folder: Path) -> dict[str, str]:
    settings, fast = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "tokenizer.json")
    found = {name: str(_content(settings[name])) for name in SPECIAL_TOKENS if settings.get(name) is not None}
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    found |= {"chat template": _digest_text(json.dumps(text))} if text else {}
    if fast:
        parts = {part: _digest_text(json.dumps(fast.get(part), sort_keys=True)) for part in TOKENIZER_PARTS}
        return found | {"vocabulary" if part == "model" else part.replace("_", " "): d for part, d in parts.items()}
    files = sorted({file for pattern in VOCABULARY_FILES for file in folder.glob(pattern)})
    return found | {file.name: _digest_file(file) for file in files}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _digest_place(place: Path) -> str:
    """A digest of a file, or of the files of a folder with their names; empty where there is neither."""
    if place.is_file():
        return _digest_file(place)
    if not place.is_dir():
        return ""
    files = [file for file in sorted(place.iterdir()) if file.is_file()]
    return _digest_text("\n".join(f"{file.name} {_digest_file(file)}" for file in files))


def _digest_file(file: Path) -> str:
    if not file.stat().st_size:
        return _digest_text("")
    with (
        file.open("rb") as handle,
        mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
    ):
        return _digest_bytes(view, whole=len(view) <= WHOLE_BYTES)


def _digest_bytes(data: memoryview, *, whole: bool) -> str:
    digest = hashlib.blake2b(digest_size=16)
    step = len(data) or 1 if whole else 16 * BLOCK_BYTES
    for start in range(0, len(data), step):
        with data[start : start + (step if whole else BLOCK_BYTES)] as block:
            digest.update(block)
    return f"{len(data)}:{digest.hexdigest()}"


def _digest_text(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
