"""``scheduler-components conformance``: the test kit's judge of live engines, on the command line.

The one place outside the test kit that imports it: the judge is a check of the kit that people run without a test.
"""

from __future__ import annotations

from typing import Annotated

import typer

from scheduler_components.testing.conformance.examine import examine_conformance
from scheduler_components.testing.conformance.zmq_probe import ProbeOptions

__all__ = ["conformance"]


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
