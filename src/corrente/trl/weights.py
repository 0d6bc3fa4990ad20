"""The weights a trainer has: where they lie, into a module, out to a folder; and the checkpoints of OUTPUT_DIR."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

from corrente.config.paths import expand_home
from corrente.controller import checkpoint_folder
from corrente.data.checkpoint_names import CHECKPOINTS, LEARNER, step_of_checkpoint
from corrente.errors import CheckpointError, ConfigError
from corrente.models import cache as model_cache
from corrente.models import pretrained
from corrente.models.progress_bars import no_progress_bars
from corrente.trl.checkpoint_links import linked_checkpoint

ADAPTER = "adapter_config.json"
NOT_MODEL = ("learner.pt",)


def load(folder: Path, given: Any, base: str, *, trust_remote_code: bool = False) -> Any:
    """The model with the weights of ``folder``: the module that was given, with them, or a new one. An adapter is put on a
    new one of ``base``: peft changes what it is put on, and a module that was given is the user's."""
    adapter = (folder / ADAPTER).is_file()
    if not isinstance(given, str | Path) and not adapter:
        return _into(given, folder)
    from transformers import AutoModelForCausalLM

    with no_progress_bars():
        if not adapter:
            return pretrained.load(AutoModelForCausalLM, folder, trust_remote_code=trust_remote_code)
        under = pretrained.load(
            AutoModelForCausalLM, model_cache.resolve_model(base), trust_remote_code=trust_remote_code
        )
        with warnings.catch_warnings():  # peft asks for an attribute that transformers has renamed
            warnings.simplefilter("ignore", FutureWarning)
            return pretrained.load_adapter(under, folder)


def load_tokenizer(folder: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer that lies beside a model."""
    from transformers import AutoTokenizer

    return pretrained.load(AutoTokenizer, model_cache.resolve_model(folder), trust_remote_code=trust_remote_code)


def copy_model(folder: Path, target: Path, given: Any) -> None:
    """Model and tokenizer of ``folder``, without what only resuming needs. An adapter names as its base what the user calls it,
    not the copy of it that runs read, which goes with the trainer."""
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.name not in NOT_MODEL:
            shutil.copyfile(file, target / file.name)
    if (folder / ADAPTER).is_file():
        settings = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        settings["base_model_name_or_path"] = _name(given)
        (target / ADAPTER).write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _name(given: Any) -> str | None:
    """Return where a model can be found again: a directory, or a name; None where that is not known."""
    name = str(given) if isinstance(given, str | Path) else str(getattr(given.config, "_name_or_path", ""))
    if Path(name).is_dir() or name in model_cache.KNOWN_MODELS:
        return str(model_cache.resolve_model(name).absolute()) if name else None
    return name or None


def _into(model: Any, folder: Path) -> Any:
    """The weights of ``folder`` in ``model``, in its own dtype and on its own device. Tied ones follow what they are tied to."""
    from safetensors.torch import load_file

    weights = {
        name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    missing, unknown = model.load_state_dict(weights, strict=False)
    tied = getattr(model, "all_tied_weights_keys", None) or ()
    lost = [name for name in missing if name in dict(model.named_parameters()) and name not in tied]
    if unknown or lost:
        raise CheckpointError(f"{folder} does not fit the model that was given: {(lost or unknown)[0]}")
    return model


def checkpoint_of(output: Path, asked: bool | str) -> Path:
    """A complete checkpoint to resume from, the newest of its run. ``asked`` True: of the run that wrote last; or the path of
    one, as OUTPUT_DIR/checkpoint-N or as it is called in its run."""
    if asked is True:
        runs = [found[-1] for found in map(checkpoint_folder.complete, output.glob(f"runs/*/{CHECKPOINTS}")) if found]
        if not runs:
            raise ConfigError(f"resume_from_checkpoint = True: {output} holds no complete checkpoint")
        return max(runs, key=lambda path: (path / checkpoint_folder.MARKER).stat().st_mtime)
    path = Path(expand_home(str(asked))).absolute()
    path = (linked_checkpoint(path) or path).resolve()
    start = path.parent if path.name == LEARNER else path
    found = checkpoint_folder.complete(start.parent)
    if start not in found:
        raise ConfigError(f"resume_from_checkpoint = {str(asked)!r}: no complete checkpoint of a run of corrente")
    return start


def put_aside(start: Path) -> None:
    """Move the checkpoints after ``start`` to superseded/ in the run's folder, for what follows replaces them."""
    found = checkpoint_folder.complete(start.parent)
    for later in found[found.index(start) + 1 :]:
        aside = start.parents[1] / "superseded"
        aside.mkdir(exist_ok=True)
        shutil.rmtree(aside / later.name, ignore_errors=True)
        later.rename(aside / later.name)


def step_of(path: Path) -> int:
    """The step a checkpoint was written after."""
    step = step_of_checkpoint(path.name)
    assert step is not None, path
    return step
