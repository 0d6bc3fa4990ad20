"""`corrente plan`: from flags, or a config and flags, to a setting of the planner; prints what a run would take."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from corrente.cli.exits import exit_codes
from corrente.errors import ConfigError

if TYPE_CHECKING:
    from corrente.plan.predict import Prediction
    from corrente.plan.setting import Setting, Split

Gpus = Annotated[str, typer.Option(help="Devices, such as 64xH100, 8xA100 or 1xCPU.")]
ModelName = Annotated[str, typer.Option(help="A directory with a config.json, or a name such as Qwen3-32B.")]
TokenLengths = Annotated[
    str,
    typer.Option(help='Tokens of completions: "mean 3200, tail 16k, max 32k, shared 0.5"; 1 in 100 exceeds the tail.'),
]
SplitText = Annotated[str, typer.Option("--split", help="Devices that generate and that train, such as 40:24.")]


ConfigOption = Annotated[Path | None, typer.Argument(help="A TOML file of a run, for what no flag says.")]
DeviceOption = Annotated[
    str, typer.Option(help='Numbers of a device that is not known: "name=X,tflops=989,tb_s=3.35,gb=80,node=8".')
]
PromptsOption = Annotated[int, typer.Option(help="Prompts of a step; 64 where nothing says.", min=0)]
GroupOption = Annotated[int, typer.Option(help="Completions of a prompt; 8 where nothing says.", min=0)]
PromptTokensOption = Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)]
TurnsOption = Annotated[int, typer.Option(help="Completions of an episode, in a row.", min=1)]
ToolsOption = Annotated[str, typer.Option(help='Seconds between turns: "2 s" or "2 s, tail 30 s".')]
RewardOption = Annotated[str, typer.Option(help='Seconds of a group\'s rewards: "0.5 s, tail 10 s".')]
TpOption = Annotated[int, typer.Option(help="Devices of an engine, tensor-parallel; 0: the fewest that fit.", min=0)]
AheadOption = Annotated[
    int, typer.Option(help="Versions that generation may run ahead: staleness.max; 1 where nothing says.", min=0)
]
MinibatchesOption = Annotated[int, typer.Option(help="Optimizer updates of a step.", min=1)]
LogprobPassesOption = Annotated[
    int,
    typer.Option(help="Forward passes beside the training one: a reference model, recomputed log-probs.", min=0),
]
PriceOption = Annotated[float, typer.Option(help="Of a device and hour, in any currency.", min=0.0)]
StepsOption = Annotated[int, typer.Option(help="Steps that hours and cost are given for.", min=1)]
SearchOption = Annotated[bool, typer.Option("--search", help="Search for the best split, degree and staleness.max.")]
MaxAheadOption = Annotated[int, typer.Option(help="The largest staleness.max that the search may take.", min=1)]
OutOption = Annotated[Path | None, typer.Option(help="Write a config of the best variant to this file.")]
AsJsonOption = Annotated[bool, typer.Option("--json", help="Print the predictions as JSON.")]
SeedOption = Annotated[int, typer.Option(help="Of the lengths that are drawn.", min=0)]


def plan(
    config: ConfigOption = None,
    model: ModelName = "",
    gpus: Gpus = "8xH100",
    device: DeviceOption = "",
    prompts: PromptsOption = 0,
    group: GroupOption = 0,
    prompt_tokens: PromptTokensOption = 512,
    tokens: TokenLengths = "",
    turns: TurnsOption = 1,
    tools: ToolsOption = "0 s",
    reward: RewardOption = "0 s",
    split: SplitText = "",
    tp: TpOption = 0,
    ahead: AheadOption = 0,
    minibatches: MinibatchesOption = 1,
    logprob_passes: LogprobPassesOption = 0,
    price: PriceOption = 0.0,
    steps: StepsOption = 1000,
    search: SearchOption = False,
    max_ahead: MaxAheadOption = 4,
    out: OutOption = None,
    as_json: AsJsonOption = False,
    seed: SeedOption = 0,
) -> None:
    """Say what a run would take before it is paid for, by running its pipeline under a virtual clock; loads no model."""
    with exit_codes():
        base = _from_config(config) if config is not None else {}
        if out is not None and out.exists():
            raise ConfigError(f"--out {out}: the file exists")
        setting = _setting(
            base,
            model=model,
            gpus=gpus,
            device=device,
            tokens=tokens,
            tools=tools,
            reward=reward,
            prompts=prompts or int(base.get("prompts", 64)),
            group=group or int(base.get("group", 8)),
            prompt_tokens=prompt_tokens,
            turns=turns,
            minibatches=minibatches,
            logprob_passes=logprob_passes,
            price=price,
            seed=seed,
        )
        if search:
            made, reasons = _searched(setting, max_ahead=max_ahead, of_steps=steps)
        else:
            made, reasons = _compared(setting, split, tp, ahead or int(base.get("ahead", 1)), of_steps=steps), ()
        _print(setting, made, reasons, of_steps=steps, as_json=as_json)
        if out is not None:
            from corrente.plan.tables import config_text

            out.write_text(config_text(setting, made[-1], model=model or str(base["model"])), encoding="utf-8")
            typer.echo(f"wrote {out}", err=True)


def _setting(
    base: Mapping[str, str | int],
    *,
    model: str,
    gpus: str,
    device: str,
    tokens: str,
    tools: str,
    reward: str,
    **numbers: Any,
) -> Setting:
    """The question that flags ask, with what the config says where they are silent."""
    from corrente.plan.devices import parse_device
    from corrente.plan.lengths import parse_lengths, parse_seconds
    from corrente.plan.models import find_model
    from corrente.plan.setting import Setting, parse_gpus

    name = model or str(base.get("model", ""))
    if not name:
        raise ConfigError(
            "--model is missing: give a directory with a config.json, a name such as Qwen3-8B, or a config"
        )
    count, kind = parse_gpus(gpus, parse_device(device) if device else None)
    return Setting(
        model=find_model(name),
        device=kind,
        devices=count,
        lengths=parse_lengths(tokens or str(base.get("tokens", "mean 1024, max 8k"))),
        tool_s=parse_seconds(tools, flag="--tools"),
        reward_s=parse_seconds(reward, flag="--reward"),
        **numbers,
    )


def _compared(setting: Setting, split: str, parallel: int, ahead: int, *, of_steps: int) -> list[Prediction]:
    from corrente.plan.predict import predict

    return [predict(setting, one, of_steps=of_steps) for one in _splits(setting, split, parallel, ahead)]


def _searched(setting: Setting, *, max_ahead: int, of_steps: int) -> tuple[list[Prediction], Sequence[str]]:
    """The best that a search finds, behind the synchronous variants of its split; and the reasons."""
    from corrente.plan.predict import predict
    from corrente.plan.search import search

    found = search(setting, max_ahead=max_ahead, of_steps=of_steps, progress=_progress)
    split = found.best.split
    whole = setting.devices - setting.devices % split.tensor_parallel
    shared = msgspec.structs.replace(split, generating=whole, training=setting.devices, ahead=0, colocated=True)
    turns = msgspec.structs.replace(split, ahead=0)
    return [*(predict(setting, one, of_steps=of_steps) for one in (shared, turns)), found.best], found.reasons


def _print(
    setting: Setting, made: Sequence[Prediction], reasons: Sequence[str], *, of_steps: int, as_json: bool
) -> None:
    if as_json:
        typer.echo(json.dumps([msgspec.to_builtins(prediction) for prediction in made], indent=2))
        return
    from corrente.plan import tables

    width = max(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 200
    typer.echo(
        tables.answer_text(tables.answer(setting, made, of_steps=of_steps, reasons=reasons), width=width), nl=False
    )


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        typer.echo(text, err=True)


def _from_config(file: Path) -> dict[str, str | int]:
    """What a config says of a plan's setting."""
    from corrente.config.load import load_config

    config = load_config(file)
    longest = config.sampling.max_tokens
    return {
        "model": config.model.path,
        "prompts": config.run.prompts_per_step,
        "group": config.run.group_size,
        "ahead": max(1, config.staleness.max or 1),
        "tokens": f"mean {max(1, longest // 3)}, max {longest}" if longest > 3 else f"mean {longest}",
    }


def _splits(setting: Setting, split: str, parallel: int, ahead: int) -> list[Split]:
    """The variants to compare: shared devices in turns, split in turns, and running ahead by 1 and by ``ahead``."""
    from corrente.errors import ConfigError
    from corrente.plan.costs import memory_use
    from corrente.plan.search import PARALLEL
    from corrente.plan.setting import Split, parse_split

    if setting.devices == 1:
        return [Split(generating=1, training=1, ahead=0, colocated=True)]
    half = setting.devices // 2
    generating, training = parse_split(split, setting.devices) if split else (half, setting.devices - half)
    degrees = [parallel] if parallel else [degree for degree in PARALLEL if degree <= generating]

    def fits(degree: int) -> bool:
        return (
            memory_use(setting, Split(generating=generating, training=training, tensor_parallel=degree)).sequences >= 8
        )

    degree = next((one for one in degrees if parallel or fits(one)), degrees[-1])
    if generating % degree:
        if split or parallel:
            raise ConfigError(f"{generating} generating devices are not whole engines of {degree}")
        generating -= generating % degree
    whole = setting.devices - setting.devices % degree
    base = Split(generating=generating, training=training, tensor_parallel=degree)
    shared = Split(generating=whole, training=setting.devices, tensor_parallel=degree, ahead=0, colocated=True)
    ways = [shared, msgspec.structs.replace(base, ahead=0)]
    ways += [msgspec.structs.replace(base, ahead=versions) for versions in sorted({1, ahead})]
    return ways
