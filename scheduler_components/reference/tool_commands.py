"""The commands that look at engines, and ``keygen``."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from observability.doctor import DoctorOptions, examine, exit_code
from observability.watch import WatchOptions
from observability.watch import watch as watch_streams
from scheduler_components.errors import ConfigError
from scheduler_components.kv_events.zmq_access import ClientKeys
from scheduler_components.kv_events.zmq_keys import write_key_pair

__all__ = ["doctor", "keygen", "watch"]

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
