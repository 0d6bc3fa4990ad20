"""One argument of TRL's configs and where it stands here: data, from which the config classes and the page are made.

key      a RunConfig key takes the value as it is
rule     decided together with others (translate.py, or the trainer); ``note`` says how
implied  accepted, and without effect of its own: what it asks for is so anyway, or cannot matter here
hint     accepted with one line of warning: it would change how fast, or where, and not what is trained
refused  any value but the default, and those in ``also``, raises ConfigError with ``note`` as the reason
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Stance = Literal["key", "rule", "implied", "hint", "refused"]
Owner = Literal["both", "grpo", "async"]
"""Which of TRL's configs has it. AsyncGRPOConfig here also has what only TRL's GRPOConfig has, so that a script for one fits."""

DOWNLOAD = ("revision", "cache_dir", "token", "local_files_only", "force_download")
"""Keys of model_init_kwargs that huggingface_hub is given."""
LOADING = (
    "attn_implementation",
    "device_map",
    "low_cpu_mem_usage",
    "max_memory",
    "offload_folder",
    "offload_state_dict",
    "tp_plan",
    "use_cache",
    "use_kernels",
    "use_safetensors",
)
"""Keys that say how a model is loaded and computed, which engines and learner decide for themselves."""


class Argument(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """``default`` is TRL's; ``asynchronous`` that of AsyncGRPOConfig, where it differs. ``type`` is what a command line reads."""

    name: str
    default: Any
    asynchronous: Any = msgspec.UNSET
    type: Any = None
    owner: Owner = "both"
    stance: Stance
    key: str = ""
    note: str = ""
    also: tuple[Any, ...] = ()

    def default_for(self, *, asynchronous: bool) -> Any:
        return self.default if not asynchronous or self.asynchronous is msgspec.UNSET else self.asynchronous

    def accepts(self, value: Any, *, asynchronous: bool) -> bool:
        """True for a value of a hint or a refused argument that asks for nothing. Only one type is compared: 0 is not False."""
        allowed = (self.default_for(asynchronous=asynchronous), *self.also)
        return any(type(value) is type(one) and value == one for one in allowed)


def key(name: str, default: Any, at: str, note: str = "", **more: Any) -> Argument:
    return Argument(name=name, default=default, stance="key", key=at, note=note, **more)


def rule(name: str, default: Any, at: str, note: str, **more: Any) -> Argument:
    return Argument(name=name, default=default, stance="rule", key=at, note=note, **more)


def implied(name: str, default: Any, note: str, **more: Any) -> Argument:
    return Argument(name=name, default=default, stance="implied", note=note, **more)


def hint(name: str, default: Any, note: str, *also: Any, **more: Any) -> Argument:
    return Argument(name=name, default=default, stance="hint", note=note, also=also, **more)


def refused(name: str, default: Any, note: str, *also: Any, **more: Any) -> Argument:
    return Argument(name=name, default=default, stance="refused", note=note, also=also, **more)
