"""From errors to one line on stderr and an exit code, for every command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

PIPELINE, CONFIG, INTERRUPTED = 1, 2, 130


@contextmanager
def exit_codes() -> Iterator[None]:
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
