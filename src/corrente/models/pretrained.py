"""Models, tokenizers and configurations of a directory: the one place that calls transformers and peft to load them.

    load(kind, folder)             what ``kind.from_pretrained`` makes of a directory, such as AutoModelForCausalLM
    from_config(kind, config)      a model of a configuration, without weights
    verify_code(folder, ...)       ConfigError where that would need Python code of the directory; loads nothing

A directory may bring Python code: its JSON files name it in ``auto_map``. That code is run only with ``trust_remote_code``.
Without it, transformers uses its own class where it has one, and everything else is refused; nobody is asked on the terminal.
Pickled weights are read with ``weights_only``, the default of transformers and peft. Imports transformers on use only.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from corrente.errors import ConfigError

KEY = "model.trust_remote_code"
CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"


def load(
    kind: Any, folder: str | Path, *, trust_remote_code: bool = False, local_files_only: bool = True, **options: Any
) -> Any:
    """``kind.from_pretrained(folder, **options)``, where ``kind`` is an Auto class of transformers.

    Raises ConfigError for what needs code that is not trusted, for code that cannot be imported and for pickled weights that hold
    more than tensors; OSError or ValueError, as transformers does, for what is no model.
    """
    verify_code(folder, kind=kind.__name__, trust_remote_code=trust_remote_code)
    options |= {"trust_remote_code": trust_remote_code, "local_files_only": local_files_only}
    if trust_remote_code:
        _import_code(Path(folder), kind=kind.__name__)
    try:
        with _no_questions():
            return kind.from_pretrained(folder, **options)
    except UnpicklingError as error:
        raise ConfigError(f"{folder}: its weights are damaged, or a pickle of more than tensors: {error}") from error


def from_config(kind: Any, config: Any, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """The model that ``load`` makes of the directory of ``config``, without weights."""
    with _no_questions():
        return kind.from_config(config, trust_remote_code=trust_remote_code, **options)


def model_class(kind: Any, config: Any, *, trust_remote_code: bool = False) -> Any:
    """The class that ``load`` and ``from_config`` make ``config`` an instance of; None where there is none."""
    if trust_remote_code and has_code(config, kind=kind.__name__):
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(config.auto_map[kind.__name__], config.name_or_path, local_files_only=True)
    return kind._model_mapping.get(type(config), None)


def has_code(config: Any, *, kind: str) -> bool:
    """True where a loaded configuration names Python code for ``kind``, the name of an Auto class."""
    return kind in (getattr(config, "auto_map", None) or {})


def end_tokens(folder: str | Path) -> Any:
    """``eos_token_id`` of generation_config.json: an id, a list of them, or None. Raises OSError or ValueError."""
    from transformers import GenerationConfig

    return GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id


def load_adapter(model: Any, folder: str | Path) -> Any:
    """``model`` with the adapter of a peft directory on it."""
    from peft import PeftModel

    with _no_questions():
        return PeftModel.from_pretrained(model, str(folder))


def verify_code(folder: str | Path, *, kind: str, trust_remote_code: bool, key: str = "") -> None:
    """Raise ConfigError where ``kind``, the name of an Auto class, needs Python code of ``folder`` and that is not trusted.

    ``key``: the one that names the folder, for the message. A folder that is not there is for others to refuse.
    """
    file = "" if trust_remote_code else code_needed(Path(folder), kind=kind)
    if file:
        named = f"{key} = {str(folder)!r}" if key else str(folder)
        raise ConfigError(
            f"{KEY} = false: {named} needs Python code that comes with it ({file}), for transformers has no class of its own for "
            f"it; read that code, and set {KEY} = true to run it"
        )


def code_needed(folder: Path, *, kind: str) -> str:
    """The Python file without which ``kind``, the name of an Auto class, cannot be loaded from ``folder``; empty where
    transformers has the class itself. Runs no code of the folder."""
    if kind == "AutoTokenizer":
        return _tokenizer_code(folder)
    given = _read(folder / CONFIG)
    mapped = _auto_map(given)
    if not mapped.keys() & {"AutoConfig", kind}:
        return ""
    import transformers

    model_type = str(given.get("model_type"))
    if model_type not in transformers.CONFIG_MAPPING:
        return _file(mapped.get("AutoConfig") or mapped[kind])
    known = kind == "AutoConfig" or (
        transformers.CONFIG_MAPPING[model_type] in getattr(transformers, kind)._model_mapping
    )
    return "" if known or kind not in mapped else _file(mapped[kind])


def _tokenizer_code(folder: Path) -> str:
    """See code_needed. Which tokenizers transformers has is asked by loading: it depends on more than one file."""
    reference = _auto_map(_read(folder / TOKENIZER_CONFIG)).get("AutoTokenizer")
    if reference is None:
        return ""
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except ValueError as error:
        return _file(reference) if "trust_remote_code" in str(error) else ""
    except OSError:
        return ""  # damaged; whoever loads it says so
    return ""


@contextmanager
def _no_questions() -> Iterator[None]:
    """transformers raises ValueError inside, where it would ask on the terminal: of a model within a model, to which it does not
    hand on ``trust_remote_code``."""
    from transformers import dynamic_module_utils

    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


def _import_code(folder: Path, *, kind: str) -> None:
    """Import the code that ``kind`` needs of a trusted folder, one process at a time: transformers copies it into a folder that
    all processes share, and a half-written copy would be imported. ConfigError for what cannot be imported."""
    named = [_auto_map(_read(folder / name)) for name in (CONFIG, TOKENIZER_CONFIG)]
    references = [_preferred(mapped[name]) for mapped in named for name in ("AutoConfig", kind) if name in mapped]
    if not references:
        return
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.utils.hub import HF_MODULES_CACHE

    shared = Path(HF_MODULES_CACHE)
    shared.mkdir(parents=True, exist_ok=True)
    with (shared / "corrente.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for reference in references:
            try:
                get_class_from_dynamic_module(reference, str(folder), local_files_only=True)
            except Exception as error:  # the code is anybody's, and raises what it likes
                raise ConfigError(
                    f"{KEY} = true: {_file(reference)} of {folder} cannot be imported: {type(error).__name__}: {error}"
                ) from error


def _read(file: Path) -> dict[str, Any]:
    """The table in a JSON file; empty where there is none, or no table."""
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return given if isinstance(given, dict) else {}


def _auto_map(given: Mapping[str, Any]) -> dict[str, Any]:
    """Auto class -> the code it stands for, as "module.Class" or "repository--module.Class"; of a tokenizer a list of two."""
    mapped = given.get("auto_map") or {}
    return mapped if isinstance(mapped, dict) else {"AutoTokenizer": mapped}


def _preferred(reference: Any) -> str:
    """Choose of a tokenizer's two classes the second, which is the fast one, if there is one."""
    return next((str(one) for one in reversed(reference) if one), "") if isinstance(reference, list) else str(reference)


def _file(reference: Any) -> str:
    """The file that holds the code: "module.py", or "repository/module.py" where that is another one."""
    repository, _, place = _preferred(reference).rpartition("--")
    return f"{f'{repository}/' if repository else ''}{place.rpartition('.')[0].replace('.', '/')}.py"
