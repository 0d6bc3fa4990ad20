"""GRPOConfig and AsyncGRPOConfig: dataclasses with TRL's arguments and defaults, made from the table (training.py, methods.py).

    AsyncGRPOConfig(output_dir="out", num_generations=8, max_staleness=2, corrente={"sync.kind": "disk"})

Values are only looked at: a dictionary or list that is passed is never changed. What is not supported raises ConfigError here, by
name, with the reason. ``corrente`` sets any key of a RunConfig, and wins over what follows from the other arguments.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from corrente.errors import ConfigError
from corrente.trl.argument import LOADING, Argument
from corrente.trl.methods import ASYNC, ELSEWHERE, GRPO, SHARED
from corrente.trl.training import TRAINING

ARGUMENTS: Mapping[str, Argument] = {a.name: a for a in (*TRAINING, *SHARED, *GRPO, *ASYNC)}
SECRET = ("hub_token",)
PASSED_ON = "corrente"
DEPRECATED = {
    "warmup_ratio": "use warmup_steps, which is a part of all steps where it is below 1",
    "max_prompt_length": "TRL has dropped it; cut or filter the prompts of the dataset",
}


class Arguments:
    """The methods of both configs. An attribute may be set later, as in TRL: the trainer looks when it is made."""

    asynchronous: ClassVar[bool]
    output_dir: str | None
    corrente: dict[str, Any] | None

    def __init__(self, output_dir: str | None = None, **values: Any) -> None:
        known = [field.name for field in dataclasses.fields(self)]  # pyright: ignore[reportArgumentType]
        for name in values:
            if name not in known:
                raise ConfigError(_unknown(type(self).__name__, name, known))
        given = {**({} if output_dir is None else {"output_dir": output_dir}), **values}
        # A command line, and dataclasses.replace, give all of them, which says nothing of what was asked for.
        self.given = frozenset(given) if len(values) < len(known) - 1 else frozenset[str]()
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            default = (
                copy.copy(ARGUMENTS[field.name].default_for(asynchronous=self.asynchronous))
                if field.name in ARGUMENTS
                else None
            )
            setattr(self, field.name, _read(field.name, given[field.name]) if field.name in given else default)
        check(self)
        for line in remarks(self):
            warnings.warn(line, stacklevel=2)

    def is_set(self, name: str) -> bool:
        """True if ``name`` was given, or set to another value than its default."""
        if name in self.given:
            return True
        value = getattr(self, name)
        default = ARGUMENTS[name].default_for(asynchronous=self.asynchronous)
        return type(value) is not type(default) or value != default

    def __repr__(self) -> str:
        said = {
            n: v for n, v in self.to_dict().items() if (n == PASSED_ON and v) or (n in ARGUMENTS and self.is_set(n))
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in said.items())})"

    def to_dict(self) -> dict[str, Any]:
        """Every argument, tokens hidden."""
        names = [field.name for field in dataclasses.fields(self)]  # pyright: ignore[reportArgumentType]
        return {n: f"<{n.upper()}>" if n in SECRET and getattr(self, n) else getattr(self, n) for n in names}

    def to_sanitized_dict(self) -> dict[str, Any]:
        """``to_dict``, with anything that is no number or text written as text: what trackers take."""
        plain = (bool, int, float, str)
        return {name: value if isinstance(value, plain) else str(value) for name, value in self.to_dict().items()}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    # What callbacks of transformers look at, of a run that has one controller.
    @property
    def world_size(self) -> int:
        return 1

    @property
    def process_index(self) -> int:
        return 0

    @property
    def should_save(self) -> bool:
        return True

    @property
    def should_log(self) -> bool:
        return True

    @property
    def train_batch_size(self) -> int:
        return int(getattr(self, "per_device_train_batch_size"))  # noqa: B009


def check(args: Arguments) -> None:
    """Raise ConfigError for the first argument that has a value we refuse."""
    passed_on = getattr(args, PASSED_ON)
    if passed_on is not None and not isinstance(passed_on, Mapping):
        raise ConfigError(f'{PASSED_ON} = {passed_on!r}: it must be a dictionary, like {{"staleness.max": 2}}')
    for name in (field.name for field in dataclasses.fields(args)):  # pyright: ignore[reportArgumentType]
        argument, value = ARGUMENTS.get(name), getattr(args, name)
        if argument is None or argument.stance != "refused":
            continue
        if not argument.accepts(value, asynchronous=args.asynchronous):
            default = argument.default_for(asynchronous=args.asynchronous)
            raise ConfigError(f"{name} = {value!r}: not supported, leave it at {default!r}: {argument.note}")


def remarks(args: Arguments) -> list[str]:
    """A line for every argument whose value is accepted and has no effect of its own, and for every deprecated one."""
    found: list[str] = []
    for name in (field.name for field in dataclasses.fields(args)):  # pyright: ignore[reportArgumentType]
        argument, value = ARGUMENTS.get(name), getattr(args, name)
        if argument is None:
            continue
        if argument.stance == "hint" and not argument.accepts(value, asynchronous=args.asynchronous):
            found.append(f"{name} = {value!r} is accepted, and changes nothing here: {argument.note}")
        elif name in DEPRECATED and value is not None:
            found.append(f"{name} = {value!r} is deprecated: {DEPRECATED[name]}")
    loading = sorted(set(LOADING) & set(getattr(args, "model_init_kwargs", None) or ()))
    if loading:
        found.append(f"model_init_kwargs: {', '.join(loading)} accepted, and without effect: workers load the model")
    return found


def _unknown(config: str, name: str, known: list[str]) -> str:
    if name in ELSEWHERE:
        return f"{config} has no argument {name}: use {ELSEWHERE[name]}"
    owners = {"grpo": "GRPOConfig", "async": "AsyncGRPOConfig"}
    if name in ARGUMENTS:
        return f"{config} has no argument {name}: it is one of {owners[ARGUMENTS[name].owner]}"
    near = difflib.get_close_matches(name, known, 1)
    helps = f"did you mean {near[0]}?" if near else "see docs/how-to/from-trl.md for all there are"
    return f"{config} has no argument {name}: {helps}"


def _read(name: str, value: Any) -> Any:
    """A dictionary that comes as text from a command line is JSON, as in transformers."""
    argument = ARGUMENTS.get(name)
    wants_table = name == PASSED_ON or (argument is not None and argument.type == dict | str | None)
    if not wants_table or not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} = {value!r}: it must be a dictionary, or JSON of one ({error})") from None


def _make(name: str, doc: str, *, asynchronous: bool) -> type[Any]:
    fields: list[tuple[str, Any, Any]] = []
    for argument in ARGUMENTS.values():
        if asynchronous or argument.owner != "async":
            default = argument.default_for(asynchronous=asynchronous)
            hint = argument.type or type(default)
            fields.append((argument.name, hint, dataclasses.field(default=default, metadata={"help": argument.note})))
    note = "Any key of a RunConfig, and its value, such as {'staleness.max': 2}"
    fields.append((PASSED_ON, dict | str | None, dataclasses.field(default=None, metadata={"help": note})))
    space = {"__doc__": doc, "__module__": __name__, "asynchronous": asynchronous}
    return dataclasses.make_dataclass(
        name, fields, bases=(Arguments,), namespace=space, init=False, eq=False, repr=False
    )


GRPOConfig = _make(
    "GRPOConfig",
    "TRL's GRPOConfig: generation and training alternate, in one process. Every argument is on docs/how-to/from-trl.md.",
    asynchronous=False,
)
AsyncGRPOConfig = _make(
    "AsyncGRPOConfig",
    "TRL's AsyncGRPOConfig, and what only its GRPOConfig has besides. Every argument is on docs/how-to/from-trl.md.",
    asynchronous=True,
)
