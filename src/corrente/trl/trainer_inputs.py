"""Objects that a trainer is given become what workers can read: directories, and keys of a RunConfig.

A loaded model, a tokenizer of the user's and loaded reward models are written below OUTPUT_DIR/.corrente, for the workers are
other processes, into a folder of the trainer's own, and removed with it. Names of the Hugging Face hub are downloaded by
huggingface_hub, or found in its cache. Nothing here loads weights.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from corrente.config.paths import expand_home
from corrente.errors import ConfigError
from corrente.models import cache as model_cache
from corrente.models import pretrained
from corrente.score.builtins import BUILTINS
from corrente.score.resolve import resolve_function
from corrente.trl.checkpoint_links import link_file

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "spiece.model",
)
BENCH = ".corrente"
"""Where trainers of an OUTPUT_DIR put what they are given as objects."""
MANY = 1_000_000
"""Turns, where TRL has no limit but that of tokens."""
PEFT_KEYS = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}


class Rewards(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Functions to be called here, with their weights, and ``reward.scorers`` for models."""

    functions: tuple[Callable[..., Any], ...] = ()
    weights: tuple[float, ...] = ()
    scorers: tuple[dict[str, Any], ...] = ()

    def tables(self) -> dict[str, Any]:
        return {
            "reward.functions": [],
            "reward.weights": list(self.weights),
            "reward.scorers": [dict(scorer) for scorer in self.scorers],
        }


NO_DOWNLOAD: Mapping[str, Any] = {}


class ModelFolder:
    """A trainer's own folder, made when something is put there, and locked as long as the trainer lives: several trainers may
    have one OUTPUT_DIR. Folders of those that were killed are removed."""

    def __init__(self, output_dir: Path, *, trust_remote_code: bool = False) -> None:
        self._output, self._trust = output_dir, trust_remote_code
        self._own: Path | None = None
        self._lock: int | None = None
        self._seen: tuple[int, ...] = ()
        self._copies = 0

    def model(self, model: Any, processing_class: Any, *, download: Mapping[str, Any] = NO_DOWNLOAD) -> str:
        """A directory with the model and the tokenizer that is to be used."""
        if not isinstance(model, str | Path):
            return str(self._loaded(model, processing_class))
        path = self.directory(str(model), key="model", download=download)
        if processing_class is None:
            return path
        return self._beside("model", path, processing_class, key="processing_class")

    def reward(self, at: int, model: Any, processing_class: Any) -> str:
        """A directory with a reward model, loaded or in a directory, and its tokenizer."""
        name, key = f"reward-{at}", f"reward_processing_classes[{at}]"
        if isinstance(model, str):
            return model if processing_class is None else self._beside(name, model, processing_class, key=key)
        home = self._empty(name)
        model.save_pretrained(home)
        _saved_tokenizer(model, processing_class, home, key=key, trust_remote_code=self._trust)
        return str(home)

    def directory(self, name: str, *, key: str, download: Mapping[str, Any] = NO_DOWNLOAD) -> str:
        """A directory, or a name corrente knows, as it is; a name of the hub as where huggingface_hub has it, with Python code
        only where that is trusted."""
        return _directory(name, key=key, download=download, code=self._trust)

    def remove(self) -> None:
        if self._own is None:
            return
        with _held(self._output):
            shutil.rmtree(self._own, ignore_errors=True)
            with contextlib.suppress(OSError):  # others have theirs in it
                self._own.parent.rmdir()
        _release(self._lock)
        self._own, self._seen = None, ()

    def _loaded(self, model: Any, processing_class: Any) -> Path:
        """Written again only where a parameter has changed since. The copy before that stays: the last run began with it, and is
        resumed with it."""
        changes = tuple(parameter._version for parameter in model.parameters())
        home = self._folder() / f"model-{self._copies}"
        if changes != self._seen or not home.is_dir():
            shutil.rmtree(self._folder() / f"model-{self._copies - 1}", ignore_errors=True)
            self._copies += 1
            home = self._empty(f"model-{self._copies}")
            model.save_pretrained(home)
            _saved_tokenizer(model, processing_class, home, key="processing_class", trust_remote_code=self._trust)
            self._seen = changes
        return home

    def _beside(self, name: str, path: str, processing_class: Any, *, key: str) -> str:
        """A model that is on disk, with this tokenizer in place of its own."""
        home = self._empty(name)
        for file in model_cache.resolve_model(path).iterdir():
            if not any(file.match(pattern) for pattern in TOKENIZER_FILES):
                link_file(file, home / file.name)
        _tokenizer(processing_class, key=key).save_pretrained(home)
        return str(home)

    def _empty(self, name: str) -> Path:
        home = self._folder() / name
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        return home

    def _folder(self) -> Path:
        if self._own is None:
            self._output.mkdir(parents=True, exist_ok=True)
            with _held(self._output):
                model_folder = self._output / BENCH
                model_folder.mkdir(exist_ok=True)
                for left in model_folder.iterdir():
                    if (lock := _lock(left, fcntl.LOCK_NB)) is not None:
                        shutil.rmtree(left, ignore_errors=True)
                        _release(lock)
                self._own = Path(tempfile.mkdtemp(dir=model_folder))
                self._lock = _lock(self._own)
        return self._own


def _lock(folder: Path, how: int = 0) -> int | None:
    """Return what holds the folder until it is released or its process ends; None if another does, or there are no locks."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | how)
    except OSError:
        os.close(handle)
        return None
    return handle


def _release(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """One process at a time."""
    lock = _lock(folder)
    try:
        yield
    finally:
        _release(lock)


def check_model(model: Any) -> None:
    """Raise ConfigError for what is no model that can be trained."""
    if isinstance(model, str | Path):
        return
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "model: a PeftModel; give its base model, and the adapter as peft_config, or one that exists with "
            "corrente={'adapters.kind': 'lora', 'adapters.init': FOLDER}"
        )
    if not hasattr(model, "save_pretrained") or not hasattr(model, "parameters"):
        raise ConfigError(
            f"model: of type {type(model).__name__}; it must be a path, a name, or a Hugging Face causal LM"
        )


def rewards(given: Any, processing_classes: Any, weights: Sequence[float] | None, model_folder: ModelFolder) -> Rewards:
    """``reward_funcs`` as TRL takes them: one or a list of functions, names of functions, and models by name, path or loaded."""
    members = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    if weights is not None and len(weights) != len(members):
        raise ConfigError(
            f"reward_weights: {len(weights)} for {len(members)} reward functions; it must have one for each"
        )
    classes = processing_classes if isinstance(processing_classes, list) else [processing_classes] * (len(members) or 1)
    if len(classes) != max(1, len(members)):
        raise ConfigError(
            f"reward_processing_classes: {len(classes)} for {len(members)} reward functions; None where one has none"
        )
    functions: list[tuple[Callable[..., Any], float]] = []
    scorers: list[dict[str, Any]] = []
    for at, (member, tokenizer) in enumerate(zip(members, classes, strict=False)):
        weight = 1.0 if weights is None else float(weights[at])
        if _is_function(member):
            functions.append(
                (resolve_function(member, key=f"reward_funcs[{at}]") if isinstance(member, str) else member, weight)
            )
            continue
        scorers.append(
            {"kind": "reward_model", "weight": weight, "chat": "given", **_scorer(at, member, tokenizer, model_folder)}
        )
    return Rewards(
        functions=tuple(f for f, _ in functions), weights=tuple(w for _, w in functions), scorers=tuple(scorers)
    )


def _is_function(member: Any) -> bool:
    if isinstance(member, str):
        return member in BUILTINS or ":" in member
    return callable(member) and not hasattr(member, "save_pretrained")


def _scorer(at: int, member: Any, tokenizer: Any, model_folder: ModelFolder) -> dict[str, Any]:
    key = f"reward_funcs[{at}]"
    if isinstance(member, str | Path):
        path = model_folder.reward(at, model_folder.directory(str(member), key=key), tokenizer)
        return {"path": path, "name": str(member).rstrip("/").rpartition("/")[2]}
    if hasattr(member, "save_pretrained"):
        name = str(getattr(member.config, "_name_or_path", "")).rstrip("/").rpartition("/")[2] or f"reward_model_{at}"
        return {"path": model_folder.reward(at, member, tokenizer), "name": name}
    raise ConfigError(
        f"{key}: of type {type(member).__name__}; it must be a function, or a Hugging Face sequence classifier"
    )


def adapters(peft_config: Any, *, model_type: str = "") -> dict[str, Any]:
    """The keys of the section adapters for a peft LoraConfig and a model of ``model_type``. What they do not say is refused by
    name."""
    if peft_config is None:
        return {}
    if str(getattr(peft_config, "peft_type", "")).rpartition(".")[2] != "LORA":
        raise ConfigError(f"peft_config: of type {type(peft_config).__name__}; only a LoraConfig is trained")
    told = {
        *PEFT_KEYS,
        "target_modules",
        "target_parameters",
        "task_type",
        "peft_type",
        "inference_mode",
        "peft_version",
        "use_rslora",
    }
    plain = type(peft_config)()
    for name, default in vars(plain).items():
        value = getattr(peft_config, name)
        if name not in told and value != default and value:
            raise ConfigError(
                f"peft_config: {name} = {value!r} is not supported; of a LoraConfig r, lora_alpha, lora_dropout, "
                "target_modules and target_parameters are"
            )
    targets = peft_config.target_modules
    if targets is None:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

        targets = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model_type)
    if targets is None:
        raise ConfigError(
            f"peft_config: target_modules = None, and peft has none for models of type {model_type!r}; name the layers, or "
            "'all-linear'"
        )
    if isinstance(targets, str) and targets != "all-linear":
        raise ConfigError(
            f"peft_config: target_modules = {targets!r}; it must be a list of names or ends of names, or 'all-linear'"
        )
    keys = {f"adapters.{ours}": getattr(peft_config, theirs) for theirs, ours in PEFT_KEYS.items()}
    if getattr(peft_config, "use_rslora", False):
        # Rank-stabilised: scaled by alpha / sqrt(r), which is another alpha over r (Kalajdzievski 2023, arXiv:2312.03732).
        keys["adapters.alpha"] = float(peft_config.lora_alpha) * math.sqrt(peft_config.r)
    return {
        "adapters.kind": "lora",
        **keys,
        "adapters.targets": [targets] if isinstance(targets, str) else sorted(targets),
        "adapters.target_parameters": sorted(getattr(peft_config, "target_parameters", None) or ()),
    }


def _directory(name: str, *, key: str, download: Mapping[str, Any], code: bool) -> str:
    if name in model_cache.KNOWN_MODELS:
        return name
    place = Path(expand_home(name)).absolute()
    if place.is_dir():
        return str(place)
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise ConfigError(f"{key} = {name!r}: no such directory, nor a name OWNER/MODEL of the Hugging Face hub")
    from huggingface_hub import snapshot_download

    files = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", *(["*.py"] if code else [])]
    try:
        return str(snapshot_download(name, allow_patterns=files, **download))
    except Exception as error:  # of network, hub, disk and cache; each library version has others
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{key} = {name!r}: no such directory, and the Hugging Face hub does not give it: {reason}"
        ) from error


def _saved_tokenizer(model: Any, processing_class: Any, home: Path, *, key: str, trust_remote_code: bool) -> None:
    if processing_class is not None:
        _tokenizer(processing_class, key=key).save_pretrained(home)
        return
    from transformers import AutoTokenizer

    name = str(getattr(model.config, "_name_or_path", ""))
    try:
        how = {"local_files_only": False, "trust_remote_code": trust_remote_code}
        pretrained.load(AutoTokenizer, name, **how).save_pretrained(home)
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{key} = None: the model was loaded from {name!r}, and there is no tokenizer there; give it"
        ) from error


def _tokenizer(processing_class: Any, *, key: str) -> Any:
    if hasattr(processing_class, "image_processor"):
        raise ConfigError(f"{key}: a processor of images; prompts are text here, so give its tokenizer")
    if not hasattr(processing_class, "save_pretrained"):
        raise ConfigError(f"{key}: of type {type(processing_class).__name__}; it must be a Hugging Face tokenizer")
    return processing_class


def placeholders(args: Any) -> list[dict[str, Any]]:
    """The rows of a run whose environment brings its own data: as in TRL, prompts without words, as many as a step may have."""
    if args.max_steps <= 0:
        raise ConfigError(
            f"max_steps = {args.max_steps}: without a train_dataset there are no epochs; give the steps to take"
        )
    count = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return [{"prompt": [{"role": "user", "content": ""}]} for _ in range(count)]


def rows(dataset: Any) -> int | None:
    """How many prompts a dataset has, or several together with equal shares; None where it does not say."""
    if isinstance(dataset, Mapping):
        each = [rows(part) for part in dataset.values()]
        return None if None in each else len(each) * max((count for count in each if count is not None), default=0)
    return len(dataset) if hasattr(dataset, "__len__") else None
