"""The commands of ``scheduler-components``. Each maps options to an exit code.

``run_command`` reports a user's mistake in one sentence. This module has the commands that observe engines, and
``keygen``. The other commands have their own modules.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.validators import Number

from observability import DoctorOptions, WatchOptions, check_conformance, check_worker, watch_streams
from observability.conformance_files import junit_xml
from observability.doctor import exit_code, render_report_json
from observability.kv_stream import UnreachableError
from scheduler_components import ComponentError, ConfigError, __version__
from scheduler_components.kv_events import write_key_pair
from scheduler_components.testing.zmq_stream_probe import ProbeOptions
from scheduler_engine.cli.chat_command import chat
from scheduler_engine.cli.dp_attn_sim_command import dp_attn_sim
from scheduler_engine.cli.engine_commands import demo, serve
from scheduler_engine.cli.hicache_sim_command import hicache_sim
from scheduler_engine.cli.keys import ApiKey, ApiKeyFile, PublisherKey, SecretKey, read_api_key, read_client_keys
from scheduler_engine.cli.new_command import new
from scheduler_engine.cli.relay_command import relay
from scheduler_engine.cli.route_command import route
from scheduler_engine.cli.run_reporter import print_lines
from scheduler_engine.cli.simulate_commands import make_simulate_app
from scheduler_engine.cli.terminal import make_console
from scheduler_engine.engine.log_output import LogConfig, configure_logging

_UNREACHABLE, _INTERRUPTED, _TERMINATED = 3, 130, 143

Target = Annotated[str, Parameter(help="A worker's URL (http://host:port) or one endpoint (tcp://host:port).")]
AsJson = Annotated[bool, Parameter(name="--json", show_default=False)]
ReplayEndpoint = Annotated[str | None, Parameter(help="Replay address of a bare endpoint.")]


def watch(
    target: Target,
    /,
    *,
    as_json: Annotated[AsJson, Parameter(help="One JSON object per line.")] = False,
    history: Annotated[bool, Parameter(show_default=False, help="Also replay earlier events.")] = False,
    replay_endpoint: ReplayEndpoint = None,
    topic: Annotated[str | None, Parameter(help="Topic to follow. Default: the worker's topic, or all.")] = None,
    count: Annotated[int | None, Parameter(validator=Number(gte=1), help="Stop after this many events.")] = None,
    duration: Annotated[float | None, Parameter(validator=Number(gte=0), help="Stop after this many seconds.")] = None,
    secret_key_file: SecretKey = None,
    publisher_key_file: PublisherKey = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
) -> int:
    """Show live KV-cache events of any engine that speaks this wire, until Ctrl-C.

    The exit code is 3 if no stream accepted a connection.
    """
    options = WatchOptions(
        as_json=as_json,
        history=history,
        replay_endpoint=replay_endpoint,
        topic=topic,
        max_events=count,
        duration_s=duration,
        keys=read_client_keys(secret_key_file, publisher_key_file),
        api_key=read_api_key("api_key", api_key, api_key_file),
    )
    with suppress(KeyboardInterrupt):  # the usual way to end it
        watch_streams(target, sys.stdout, options)
    return 0


def doctor(
    target: Target,
    /,
    *,
    replay_endpoint: ReplayEndpoint = None,
    topic: Annotated[str | None, Parameter(help="Topic of a bare endpoint. Default: all.")] = None,
    timeout: Annotated[float, Parameter(validator=Number(gte=0.1), help="Seconds to wait for one answer.")] = 2.0,
    listen: Annotated[float, Parameter(validator=Number(gte=0), help="Seconds to follow the streams at most.")] = 8.0,
    as_json: Annotated[AsJson, Parameter(help="The whole report as one JSON object.")] = False,
    secret_key_file: SecretKey = None,
    publisher_key_file: PublisherKey = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
) -> int:
    """Connect to one endpoint, or to those that a worker's /server_info advertises, and report what is wrong.

    The exit code is 1 if something is wrong and 3 if nothing answers.
    """
    keys = read_client_keys(secret_key_file, publisher_key_file)
    key = read_api_key("api_key", api_key, api_key_file)
    options = DoctorOptions(
        timeout_s=timeout, listen_s=listen, keys=keys, api_key=key, replay_endpoint=replay_endpoint, topic=topic
    )
    report = check_worker(target, options)
    print_lines((render_report_json(target, report),) if as_json else map(str, report))
    return exit_code(report)


def conformance(
    target: Target,
    /,
    *,
    replay_endpoint: ReplayEndpoint = None,
    topic: Annotated[str | None, Parameter(help="Topic that a bare endpoint must send. Default: any.")] = None,
    block_size: Annotated[
        int | None, Parameter(validator=Number(gte=1), help="Tokens per block of a bare endpoint.")
    ] = None,
    listen: Annotated[float, Parameter(validator=Number(gte=0), help="Seconds to listen at most.")] = 10.0,
    batches: Annotated[
        int, Parameter(validator=Number(gte=1), help="Stop when each stream has sent this many live batches.")
    ] = 200,
    timeout: Annotated[
        float, Parameter(validator=Number(gte=0.1), help="Longest silence, in seconds, while waiting for a replay.")
    ] = 3.0,
    oracle: Annotated[
        str | None,
        Parameter(help="URL of an engine that serves /kv_pool, to compare the streams with its pools."),
    ] = None,
    junit: Annotated[
        Path | None, Parameter(help="Write JUnit XML to this file: one test case per rule and stream.")
    ] = None,
    as_json: Annotated[AsJson, Parameter(help="The whole report as one JSON object.")] = False,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
) -> int:
    """Check the event streams of an engine against every rule of the wire.

    The exit code is 1 if the engine does not conform, 3 if no stream accepts a connection or the oracle does not
    answer, and 4 if a stream differs from the pool. Send requests to the engine during the check: a rule that no
    event could break is reported as not judged.
    """
    if junit is not None and (junit.is_dir() or not junit.parent.is_dir()):
        hint = "create the folder or name another file"
        raise ConfigError("junit", str(junit), "is not a file in an existing folder", hint)
    report = check_conformance(
        target,
        ProbeOptions(listen_s=listen, enough_batches=batches, answer_s=timeout),
        replay_endpoint=replay_endpoint,
        topic=topic,
        block_size=block_size,
        oracle=oracle,
        api_key=read_api_key("api_key", api_key, api_key_file),
    )
    print_lines((report.to_json(),) if as_json else report.lines())
    if junit is not None:
        try:
            junit.write_text(junit_xml(report), encoding="utf-8")
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
            raise ConfigError("junit", str(junit), problem, "name another file") from error
    return report.exit_code


def keygen(
    directory: Annotated[
        Path, Parameter(help="Directory of the two files. A missing directory is created with private permissions.")
    ],
    name: Annotated[str, Parameter(help="Name of the publisher or client, for example router-1.")],
    /,
) -> int:
    """Make a CURVE key pair for an event publisher or one of its clients. SECURITY.md says where each file goes."""
    public_file, secret_file = write_key_pair(directory, name)
    print_lines((f"public key, to hand out:  {public_file}", f"secret key, to keep here: {secret_file}"))
    return 0


Logging = Annotated[LogConfig, Parameter(name="*", group=Group("Logging", sort_key=9))]  # every command has it
_LOGS = LogConfig()

COMMANDS: dict[str, Callable[..., int]] = {
    "serve": serve,
    "demo": demo,
    "chat": chat,
    "watch": watch,
    "doctor": doctor,
    "conformance": conformance,
    "new": new,
    "relay": relay,
    "route": route,
    "hicache-sim": hicache_sim,
    "dp-attn-sim": dp_attn_sim,
    "keygen": keygen,
}
"""Commands by name."""

GROUPS: dict[str, Callable[[], App]] = {"simulate": make_simulate_app}
"""Groups of commands by name. Other wheels add theirs under the entry points ``scheduler_components.commands``."""


_REMOVED = {
    "completion": "`python -c 'from scheduler_engine.cli.commands import make_app;"
    ' print(make_app().generate_completion(shell="bash"))\'`',
    "simulate delivery": "`make worlds WORLDS='--seeds 1000'` in a checkout of the repository",
    "refactor carry": "`refactor move --recipe` on the branch, then `git rebase`",
}
"""What replaces each removed command."""


def run_command(arguments: Sequence[str]) -> tuple[int, str]:
    """Run the command of a command line.

    Args:
        arguments: command-line arguments without the program name.

    Returns:
        The exit code, and a line for standard error; empty for success.
    """
    for removed, instead in _REMOVED.items():
        if " ".join(arguments[:2]).startswith(removed):
            return 2, f"{removed} is removed; use {instead}"
    try:
        return make_app().meta(arguments) or 0, ""
    except CycloptsError as error:
        return 2, str(error)
    except ConfigError as error:
        return 2, str(error)
    except UnreachableError as error:
        return _UNREACHABLE, str(error)
    except ComponentError as error:
        return 1, str(error)
    except KeyboardInterrupt:
        return _INTERRUPTED, "interrupted; all processes are stopped"
    except asyncio.CancelledError:
        return _TERMINATED, "terminated; all processes are stopped"


def make_app() -> App:
    """Make the command-line parser with all commands. Its ``meta`` adds the options that all of them have."""
    app = App(
        name="scheduler-components",
        help="A reference engine composed of scheduler components, and tools that look at engines.",
        version=__version__,
        console=make_console(),
        help_flags=["--help"],
        default_parameter=Parameter(negative=()),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        print_error=False,
        exit_on_error=False,
    )
    for name, command in COMMANDS.items():
        app.command(command, name=name)
    for make_group in (
        *GROUPS.values(),
        *(each.load() for each in entry_points(group="scheduler_components.commands")),
    ):
        app.command(make_group())

    app.meta.suppress_keyboard_interrupt = False  # cyclopts would exit without our line

    @app.meta.default
    def launch(
        *arguments: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)], logs: Logging = _LOGS
    ) -> int:
        """Configure the log of this process, then run the command."""
        configure_logging(logs)
        command, bound, not_parsed = app.parse_args(arguments)
        given = {"logs": logs} if "logs" in not_parsed else {}  # for commands that start further processes
        status: int | None = command(*bound.args, **bound.kwargs, **given)
        return status or 0

    return app
