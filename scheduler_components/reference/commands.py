"""The commands of ``scheduler-components``: options in, exit code out; a mistake comes out as the error that it is."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from scheduler_components import __version__
from scheduler_components.errors import ComponentError, ConfigError
from scheduler_components.reference.conformance_command import conformance
from scheduler_components.reference.engine_commands import demo, serve
from scheduler_components.reference.hicache_sim_command import hicache_sim
from scheduler_components.reference.lint_command import lint_components
from scheduler_components.reference.tool_commands import doctor, keygen, watch

__all__ = ["app", "run_command"]

app = typer.Typer(
    help="A reference engine composed of scheduler components, and tools that look at engines.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (serve, demo, watch, doctor, conformance, hicache_sim, lint_components, keygen):
    app.command()(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """A reference engine composed of scheduler components, and tools that look at engines."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run_command() -> tuple[int, str]:
    """Run what the command line asks for.

    Returns:
        The exit code, and one line for standard error when there is something to complain of.
    """
    try:
        status = app(standalone_mode=False) or 0
    except ConfigError as error:
        return 2, str(error)
    except typer.TyperException as error:
        return 2, error.format_message()
    except ComponentError as error:
        return 1, str(error)
    except asyncio.CancelledError:
        return 143, "terminated; all processes are stopped"
    return status, "interrupted; all processes are stopped" if status == 130 else ""
