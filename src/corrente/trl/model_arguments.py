"""TRL's arguments of a model: its type, its files, and whether its code is trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corrente.errors import ConfigError
from corrente.trl.argument import DOWNLOAD, LOADING
from corrente.trl.config import PASSED_ON


def download_arguments(args: Any) -> dict[str, Any]:
    """The keys of model_init_kwargs that decide which files of the hub are used."""
    return {name: value for name, value in (args.model_init_kwargs or {}).items() if name in DOWNLOAD}


def compute_dtype(args: Any) -> str:
    """The type of matrix products; what is loaded is float32 in any case. ConfigError for a key that would change the model."""
    asked = {
        name: value
        for name, value in (args.model_init_kwargs or {}).items()
        if name not in (*DOWNLOAD, *LOADING, "trust_remote_code")
    }
    wanted = asked.pop("dtype", asked.pop("torch_dtype", getattr(args, "dtype", "float32")))
    if asked:
        raise ConfigError(
            f"model_init_kwargs = {asked!r}: it would load another model than the one that is trained; taken are dtype, "
            f"trust_remote_code, {', '.join(DOWNLOAD)}, and as hints {', '.join(LOADING)}"
        )
    name = str(wanted).removeprefix("torch.")
    if name not in ("auto", "float32", "bfloat16", "None"):
        raise ConfigError(f"dtype = {name!r}: it must be float32, bfloat16 or auto")
    if args.bf16 is not None:
        return "bfloat16" if args.bf16 else "float32"
    return "bfloat16" if name == "bfloat16" else "auto"


def trusts_code(args: Any) -> bool:
    """True where Python code of models is to be run: ``corrente`` says so, or says nothing and one of TRL's two places does."""
    key, passed = "model.trust_remote_code", getattr(args, PASSED_ON)
    asked = [args.trust_remote_code, dict(args.model_init_kwargs or {}).get("trust_remote_code", False)]
    given = [passed[key]] if isinstance(passed, Mapping) and key in passed else asked
    for value in given:
        if not isinstance(value, bool):
            raise ConfigError(f"trust_remote_code = {value!r}: it must be True or False")
    return any(given)
