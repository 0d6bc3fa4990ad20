"""The command line: run, fetch, doctor. Turns arguments into calls, and errors into one line and an exit code.

    0    the run took all its steps, ran out of data, or was stopped cleanly by Ctrl-C (a checkpoint was written)
    1    the run could not go on, or a download failed; the message says why
    2    a setting is wrong; nothing was loaded and nothing written
    130  stopped at once by a second Ctrl-C

Help, --dry-run and a wrong setting answer without importing torch: what is heavy is imported by the command that needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from corrente import __version__

if TYPE_CHECKING:
    from corrente.config import RunConfig

PIPELINE, CONFIG, INTERRUPTED = 1, 2, 130

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
    with _exits():
        from corrente import loading

        resolved = loading.load(config, [*(overrides or []), *([f"run.name={name}"] if name is not None else [])])
        loading.check(resolved)
        if dry_run:
            typer.echo(loading.dump(resolved, notes=_notes(resolved)), nl=False)
            return
        _train(resolved, resume=resume)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A model by name, such as smollm2-135m-instruct.")],
) -> None:
    """Download, verify and convert a model into the cache ($CORRENTE_CACHE, or ~/.cache/corrente)."""
    with _exits():
        from corrente import models

        home = models.fetch(name, tell=lambda what: typer.echo(f"{name}: {what}", err=True))
        typer.echo(str(home))


@app.command()
def doctor() -> None:
    """Say what this machine can run, and the command that adds what is missing."""
    with _exits():
        from corrente.doctor import examine

        for finding in examine():
            typer.echo(f"{'ok' if finding.fine else '--':3} {finding.subject:24} {finding.found}")
            if finding.remedy:
                typer.echo(f"{'':28} {finding.remedy}")


@contextmanager
def _exits() -> Iterator[None]:
    """Errors that have a name become one line on stderr, their notes another, and an exit code; our bugs keep their traceback."""
    from corrente.errors import ConfigError, CorrenteError, Interrupted, LedgerError

    try:
        yield
    except LedgerError:
        raise
    except ConfigError as error:
        _fail(error, str(error), CONFIG)
    except (Interrupted, KeyboardInterrupt) as error:
        _fail(error, "stopped", INTERRUPTED)
    except (CorrenteError, OSError) as error:
        _fail(error, f"{type(error).__name__}: {error}", PIPELINE)


def _fail(error: BaseException, text: str, code: int) -> NoReturn:
    for line in (text, *getattr(error, "__notes__", ())):
        typer.echo(f"corrente: {' '.join(line.split())}", err=True)
    raise typer.Exit(code) from None


def _notes(config: RunConfig) -> list[str]:
    """What follows from a config, as comments for --dry-run."""
    from corrente import models
    from corrente.staleness import gate

    samples = config.run.prompts_per_step * config.run.group_size
    slots, age = gate.slots(config), gate.max_age(config)
    model = models.cached(config.model.path) or config.model.path
    fetched = "" if Path(model).is_dir() else f" (not fetched yet: corrente fetch {config.model.path})"
    return [
        f"{samples} samples a step, {samples * config.run.steps} in all; a new version every {config.sync.every} steps",
        f"slots = {slots or 'unlimited'}, window = {gate.window(config) or 'none'} (groups)",
        f"age of a trained token: {'no bound' if age is None else f'at most {age}'} (versions)",
        f"model: {model}{fetched}",
    ]


def _train(config: RunConfig, *, resume: bool) -> None:
    """Open the run folder, run, and say what came of it."""
    import anyio
    from rich.console import Console

    from corrente import models, runfolder
    from corrente.observe.console import ConsoleSink
    from corrente.observe.jsonl import JsonlSink, read_metrics
    from corrente.observe.summary import Summary

    models.resolve(config.model.path)
    summary = Summary()
    if resume:
        folder = runfolder.reopen(config)
        runfolder.keep(folder, config)
        summary.replay(read_metrics(folder))
    else:
        config, folder = runfolder.create(config)
    screen = Console(file=sys.stdout)
    screen.print(f"{folder}: starting engine and learner", highlight=False, markup=False, soft_wrap=True)
    console = ConsoleSink(screen, steps=config.run.steps, done=summary.step, title=str(folder))
    sinks = [console, JsonlSink(folder, timeline=config.observe.timeline), summary]
    from corrente import assemble

    again = f"corrente run {folder / runfolder.CONFIG} --resume"
    try:
        outcome = anyio.run(lambda: assemble.main(config, sinks=sinks, resume=resume))
    except BaseException as error:
        console.close()
        if any((folder / "checkpoints").glob("step-*")):
            error.add_note(f"to go on from the newest checkpoint: {again}")
        raise
    ended = {"steps": "all taken", "data": "no more prompts", "stopped": "stopped"}.get(outcome.ended, outcome.ended)
    for label, text in [*summary.lines(ended=ended, counts=outcome.counts), ("folder", str(folder))]:
        typer.echo(f"{label:14}{text}")
    if outcome.ended == "stopped":
        typer.echo(f"{'to go on':14}{again}")
