"""The commands of ``scheduler-components``: options in, exit code out; a mistake comes out as the error that it is."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from observability import DoctorOptions, WatchOptions, examine, examine_conformance, exit_code, watch_streams
from scheduler_components import ComponentError, ConfigError, __version__
from scheduler_components.kv_events import ClientKeys, write_key_pair
from scheduler_components.reference.cli.engine_commands import demo, serve
from scheduler_components.reference.cli.hicache_sim_command import hicache_sim
from scheduler_components.testing import ProbeOptions

__all__ = [
    "conformance",
    "doctor",
    "keygen",
    "watch",
    "app",
    "run_command",
]


def conformance(
    target: Annotated[str, typer.Argument(help="A worker's URL (http://host:port) or one endpoint (tcp://host:port).")],
    replay_endpoint: Annotated[str | None, typer.Option(help="Replay address of a bare endpoint.")] = None,
    topic: Annotated[str | None, typer.Option(help="Topic that a bare endpoint must send. Default: any.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens a block of a bare endpoint.")] = None,
    listen: Annotated[float, typer.Option(min=0, help="Seconds to listen at most.")] = 10.0,
    batches: Annotated[int, typer.Option(min=1, help="Stop when each stream has sent so many live batches.")] = 200,
    timeout: Annotated[float, typer.Option(min=0.1, help="Longest silence in which a replay is waited for.")] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="The whole report as one JSON object.")] = False,
) -> int:
    """Judge an engine by what its event streams really send, rule by rule; exit code 1 when it does not conform.

    Send the engine requests meanwhile: a rule that nothing could break is reported as not judged.
    """
    report = examine_conformance(
        target,
        ProbeOptions(listen_s=listen, enough_batches=batches, answer_s=timeout),
        replay_endpoint=replay_endpoint,
        topic=topic,
        block_size=block_size,
    )
    for line in (report.to_json(),) if as_json else report.lines():
        typer.echo(line)
    return report.exit_code


# The commands that look at engines, and ``keygen``.

_SecretKey = Annotated[str | None, typer.Option(help="This client's secret key, for a stream that asks for keys.")]
_PublisherKey = Annotated[str | None, typer.Option(help="The stream's public key, given with --secret-key-file.")]


def watch(
    target: Annotated[str, typer.Argument(help="A worker's URL (http://host:port) or one endpoint (tcp://host:port).")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    history: Annotated[bool, typer.Option("--history", help="Also replay what was published before.")] = False,
    replay_endpoint: Annotated[str | None, typer.Option(help="Replay address of a bare endpoint.")] = None,
    topic: Annotated[str | None, typer.Option(help="Topic to follow. Default: what the worker says, or all.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after so many events.")] = None,
    duration: Annotated[float | None, typer.Option(min=0, help="Stop after so many seconds.")] = None,
    secret_key_file: _SecretKey = None,
    publisher_key_file: _PublisherKey = None,
) -> int:
    """Show live KV-cache events of any engine that speaks this wire, until Ctrl-C."""
    options = WatchOptions(
        as_json=as_json,
        history=history,
        replay_endpoint=replay_endpoint,
        topic=topic,
        max_events=count,
        duration_s=duration,
        keys=_client_keys(secret_key_file, publisher_key_file),
    )
    with suppress(KeyboardInterrupt):  # the usual end of it
        watch_streams(target, sys.stdout, options)
    return 0


def doctor(
    url: Annotated[str, typer.Argument(help="A worker's URL (http://host:port).")],
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for one answer.")] = 2.0,
    listen: Annotated[float, typer.Option(min=0, help="Seconds to follow the streams at most.")] = 8.0,
    secret_key_file: _SecretKey = None,
    publisher_key_file: _PublisherKey = None,
) -> int:
    """Dial what a worker's /server_info advertises and say what is wrong with it; exit code 1 when something is."""
    keys = _client_keys(secret_key_file, publisher_key_file)
    findings = examine(url, DoctorOptions(timeout_s=timeout, listen_s=listen, keys=keys))
    for finding in findings:
        typer.echo(str(finding))
    return exit_code(findings)


def keygen(
    directory: Annotated[Path, typer.Argument(help="Where the two files go; made, private, where it is not there.")],
    name: Annotated[str, typer.Argument(help="Of the publisher or the client, for example router-1.")],
) -> int:
    """Make a CURVE key pair for an event publisher or one of its clients; SECURITY.md says where each file goes."""
    public_file, secret_file = write_key_pair(directory, name)
    typer.echo(f"public key, to hand out:  {public_file}")
    typer.echo(f"secret key, to keep here: {secret_file}")
    return 0


def _client_keys(secret_key_file: str | None, publisher_key_file: str | None) -> ClientKeys | None:
    if secret_key_file is None and publisher_key_file is None:
        return None
    if secret_key_file is None or publisher_key_file is None:
        missing = "secret_key_file" if secret_key_file is None else "publisher_key_file"
        raise ConfigError(missing, None, "is missing", "give both key files, or neither")
    return ClientKeys.read(secret_key_file, publisher_key_file)


app = typer.Typer(
    help="A reference engine composed of scheduler components, and tools that look at engines.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (serve, demo, watch, doctor, conformance, hicache_sim, keygen):
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
