"""The command line: run, eval, plan, push, engine, fetch, doctor. Arguments become calls, errors an exit code.

    0    the run took all its steps, ran out of data, or was stopped cleanly by Ctrl-C (a checkpoint was written)
    1    the run could not go on, or a download failed; the message says why
    2    a setting is wrong; nothing was loaded and nothing written
    130  stopped at once by a second Ctrl-C; what was kept, and how to go on, is said

Help, --dry-run and a wrong setting answer without importing torch: what is heavy is imported by the command that needs it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corrente.cli.exits import exit_codes
from corrente.cli.plan import plan
from corrente.version import __version__

if TYPE_CHECKING:
    from corrente.config import RunConfig
    from corrente.controller.evaluator import Evaluation
    from corrente.entrypoints.eval_target import EvalTarget

app = typer.Typer(
    name="corrente",
    help="Asynchronous reinforcement learning for language models: generation never stops, training never waits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the `corrente` command."""
    app()


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"corrente {__version__}")
        raise typer.Exit


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A TOML file; see docs/reference/configuration.md for every key.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set one key, such as staleness.max=2. May be repeated."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; the same as --set run.name=NAME.")] = None,
    resume: Annotated[
        bool, typer.Option(help="Go on from the newest complete checkpoint of the run of this name.")
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="Check everything, print the resolved config, and stop.")] = False,
) -> None:
    """Train a model as CONFIG says. Writes runs/NAME/; Ctrl-C stops cleanly, with a checkpoint."""
    with exit_codes():
        from corrente.config.load import dump_config, load_config

        resolved = load_config(config, [*(overrides or []), *([f"run.name={name}"] if name is not None else [])])
        if resume:
            from corrente.entrypoints.run_folder import located

            resolved = located(resolved, config, said=[*(overrides or []), *(["run.name"] if name is not None else [])])
        if dry_run:
            from corrente.entrypoints.checks import check_config

            check_config(resolved)
            typer.echo(dump_config(resolved, notes=_notes(resolved)), nl=False)
            return
        from corrente.entrypoints.train import train

        typer.echo(str(train(resolved, resume=resume, console=sys.stdout)))


@app.command("eval")
def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run; or a TOML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set one key, such as eval.samples=8. May be repeated."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="STEP", help="A checkpoint of the run, such as step-000050; else the newest.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Evaluate this model, or peft adapter, with the settings of RUN.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Append the result to this file; RUN/eval.jsonl for a run.")] = None,
) -> None:
    """Play held-out prompts with the weights of a checkpoint, a model or a config; train nothing. Prints a table."""
    with exit_codes():
        from corrente.entrypoints.checks import check_config
        from corrente.entrypoints.eval_target import find_target

        found = find_target(target, overrides=overrides or (), checkpoint=checkpoint, model=model, out=out)
        check_config(found.config)
        typer.echo(f"{found.label}: starting the engine", err=True)
        from corrente.entrypoints.evaluate import evaluate_target

        _print_evaluation(found, evaluate_target(found))


app.command()(plan)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A model by name, such as smollm2-135m-instruct.")],
) -> None:
    """Download, verify and convert a model into the cache ($CORRENTE_CACHE, or ~/.cache/corrente)."""
    with exit_codes():
        from corrente.models import cache as model_cache

        home = model_cache.fetch_model(name, report=lambda what: typer.echo(f"{name}: {what}", err=True))
        typer.echo(str(home))


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    repo: Annotated[str, typer.Option(metavar="OWNER/NAME", help="Where to on the Hugging Face hub.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write what would be uploaded there, and upload nothing.")] = None,
    checkpoint: Annotated[
        str, typer.Option(metavar="STEP", help="A checkpoint of the run, such as step-000050; else the newest.")
    ] = "",
    private: Annotated[bool | None, typer.Option(help="Of a repository that is made.")] = None,
) -> None:
    """Upload a run's model with a card that says how it was trained; the key is that of `hf auth login`, or $HF_TOKEN."""
    with exit_codes():
        from corrente.entrypoints import export
        from corrente.errors import ConfigError

        if bool(repo) == (out is not None):
            raise ConfigError("give one of --repo OWNER/NAME and --out DIRECTORY")
        if out is not None:
            export.write_upload(folder, out, checkpoint_name=checkpoint, repo=repo)
            typer.echo(str(out))
        else:
            typer.echo(export.push_run(folder, repo, checkpoint_name=checkpoint, private=private))


@app.command()
def engine(
    join: Annotated[
        Path, typer.Option(metavar="RUN_FOLDER", help="The folder of a run that goes on with pool.join = true.")
    ],
    model: Annotated[
        Path | None, typer.Option(help="Where this engine has the model; the run's own place when left out.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads to decode with; 0: as many as cores.")] = 0,
) -> None:
    """Serve a run of this host as one more engine, until it ends; Ctrl-C leaves it, and what is under way goes on elsewhere."""
    with exit_codes():
        from corrente.runtime.join_client import join_run

        join_run(join, model=model, threads=threads)


@app.command()
def doctor() -> None:
    """Say what this machine can run, and the command that adds what is missing."""
    with exit_codes():
        from corrente.cli.doctor import examine

        for finding in examine():
            typer.echo(f"{'ok' if finding.fine else '--':3} {finding.subject:24} {finding.found}")
            if finding.remedy:
                typer.echo(f"{'':28} {finding.remedy}")


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _notes(config: RunConfig) -> list[str]:
    """The numbers that follow from a config, as comments for --dry-run."""
    from corrente.entrypoints.checks import cautions
    from corrente.models import cache as model_cache
    from corrente.staleness import gate

    samples = config.run.prompts_per_step * config.run.group_size
    slots, age = gate.slots(config), gate.max_age(config)
    model = model_cache.cached_model(config.model.path) or config.model.path
    fetched = "" if Path(model).is_dir() else f" (not fetched yet: corrente fetch {config.model.path})"
    return [
        f"{samples} samples a step, {samples * config.run.steps} in all; a new version every {_steps(config.sync.every)}",
        f"slots = {slots or 'unlimited'}, window = {gate.window(config) or 'none'} (groups)",
        f"age of a trained token: {'no bound' if age is None else f'at most {age}'} (versions)",
        f"model: {model}{fetched}",
        *(f"warning: {caution}" for caution in cautions(config)),
    ]


def _print_evaluation(target: EvalTarget, evaluation: Evaluation) -> None:
    """Print the table of an evaluation, and how many completions were lost."""
    from corrente.observe.eval_table import align_columns, eval_table

    judged, lost = evaluation.metrics["eval/episodes"], evaluation.metrics["eval/lost"]
    for line in align_columns(eval_table(evaluation.metrics)):
        typer.echo(line)
    typer.echo(f"{judged:.0f} completions by {target.label} (step {target.step}, version {target.version})")
    if lost:
        typer.echo(f"{lost:.0f} completions were lost; the first: {evaluation.error}")
    if target.record is not None:
        typer.echo(f"added to {target.record}")
