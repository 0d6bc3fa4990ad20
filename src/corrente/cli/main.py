"""The command line: run, eval, push, engine, fetch, doctor. Turns arguments into calls, errors into one line and an exit code.

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

from corrente.version import __version__

if TYPE_CHECKING:
    from corrente.cli.eval_command import Subject
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
        from corrente.config.load import dump_config, load_config
        from corrente.entrypoints.checks import check_config

        resolved = load_config(config, [*(overrides or []), *([f"run.name={name}"] if name is not None else [])])
        check_config(resolved)
        if dry_run:
            typer.echo(dump_config(resolved, notes=_notes(resolved)), nl=False)
            return
        _train(resolved, resume=resume)


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
    with _exits():
        from corrente.cli import eval_command
        from corrente.entrypoints.checks import check_config

        subject = eval_command.subject(
            target, overrides=overrides or (), checkpoint_name=checkpoint, model=model, out=out
        )
        check_config(subject.config)
        _evaluate(subject)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A model by name, such as smollm2-135m-instruct.")],
) -> None:
    """Download, verify and convert a model into the cache ($CORRENTE_CACHE, or ~/.cache/corrente)."""
    with _exits():
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
    with _exits():
        from corrente.entrypoints import export
        from corrente.errors import ConfigError

        if bool(repo) == (out is not None):
            raise ConfigError("give one of --repo OWNER/NAME and --out DIRECTORY")
        if out is not None:
            export.stage(folder, out, checkpoint_name=checkpoint, repo=repo)
            typer.echo(str(out))
        else:
            typer.echo(export.push(folder, repo, checkpoint_name=checkpoint, private=private))


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
    with _exits():
        from corrente.runtime.join_client import join_run

        join_run(join, model=model, threads=threads)


@app.command()
def doctor() -> None:
    """Say what this machine can run, and the command that adds what is missing."""
    with _exits():
        from corrente.cli.doctor import examine

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


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _notes(config: RunConfig) -> list[str]:
    """What follows from a config, as comments for --dry-run."""
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
    ]


def _evaluate(subject: Subject) -> None:
    """Evaluate, say what came of it, and keep it. What an evaluation lost is said; one that lost all has failed."""
    import anyio

    from corrente.cli import eval_command
    from corrente.entrypoints.evaluate import run_evaluation
    from corrente.errors import PipelineError
    from corrente.models import cache as model_cache
    from corrente.observe.eval_table import align_columns, eval_table

    model_cache.resolve_model(subject.config.model.path)
    with eval_command.apart(subject):
        typer.echo(f"{subject.label}: starting the engine", err=True)
        evaluation = anyio.run(lambda: run_evaluation(subject.config, step=subject.step, version=subject.version))
    eval_command.keep(subject, evaluation)
    judged, lost = evaluation.metrics["eval/episodes"], evaluation.metrics["eval/lost"]
    if not judged:
        raise PipelineError(f"all {lost:.0f} completions were lost; the first: {evaluation.error}")
    for line in align_columns(eval_table(evaluation.metrics)):
        typer.echo(line)
    typer.echo(f"{judged:.0f} completions by {subject.label} (step {subject.step}, version {subject.version})")
    if lost:
        typer.echo(f"{lost:.0f} completions were lost; the first: {evaluation.error}")
    if subject.record is not None:
        typer.echo(f"added to {subject.record}")


def _train(config: RunConfig, *, resume: bool) -> None:
    """Open the run folder, and run in it."""
    from corrente.entrypoints import run_folder
    from corrente.models import cache as model_cache

    model_cache.resolve_model(config.model.path)
    if resume:
        folder = run_folder.reopen(config)
    else:
        config, folder = run_folder.create(config)
    with run_folder.held(folder):
        _train_in(folder, config, resume=resume)


def _train_in(folder: Path, config: RunConfig, *, resume: bool) -> None:
    """Run, and say what came of it."""
    import anyio
    from rich.console import Console

    from corrente.config import Procs, Window
    from corrente.entrypoints import run_folder
    from corrente.observe.console import ConsoleSink
    from corrente.observe.fanout import Fanout
    from corrente.observe.jsonl import JsonlSink, read_metrics
    from corrente.observe.summary import SummarySink
    from corrente.observe.trackers import open_trackers

    runs_ahead = isinstance(config.buffer, Window) and isinstance(config.runtime, Procs) and config.staleness.max > 0
    summary = SummarySink(may_run_ahead=runs_ahead)
    if resume:
        run_folder.keep(folder, config)
        summary.add_records(read_metrics(folder))
    screen = Console(file=sys.stdout)
    screen.print(f"{folder}: starting engine and learner", highlight=False, markup=False, soft_wrap=True)
    console = ConsoleSink(screen, steps=config.run.steps, done=summary.step, title=str(folder))
    record = JsonlSink(folder, timeline=config.observe.timeline)
    sinks = [console, record, summary, *open_trackers(config, folder, done=summary.step)]
    from corrente.entrypoints.train import run_training
    from corrente.errors import CheckpointError

    again = f"corrente run {folder / run_folder.CONFIG} --resume"
    try:
        outcome = anyio.run(lambda: run_training(config, sinks=sinks, resume=resume))
    except BaseException as error:
        Fanout(sinks).close()
        if any((folder / "checkpoints").glob("step-*")) and not isinstance(error, CheckpointError):
            error.add_note(f"to go on from the newest checkpoint: {again}")
        raise
    ended = {"steps": "all taken", "data": "no more prompts", "stopped": "stopped"}.get(outcome.ended, outcome.ended)
    for label, text in [*summary.summary_lines(ended=ended, counts=outcome.counts), ("folder", str(folder))]:
        typer.echo(f"{label:14}{text}")
    if outcome.ended == "stopped":
        typer.echo(f"{'to go on':14}{again}")
