"""The conformance check on live sockets: the kit's engines conform, and faults and wrong targets get a hint."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from kit.http_worker import Pages

from observability import check_conformance
from observability.conformance import ConformanceReport, RuleResult
from scheduler_components import ConfigError, KVEventBatch, StartError
from scheduler_components.kv_events import Endpoint, KVEventsConfig, ZmqEventPublisher
from scheduler_components.testing import ScriptedPublisher
from scheduler_components.testing.chain_event_generator import ChainEventGenerator
from scheduler_components.testing.interfaces import BLOCK_SIZE, BoundPublisher, Frames
from scheduler_components.testing.zmq_stream_probe import ProbeOptions
from scheduler_engine.cli import main as cli

pytestmark = pytest.mark.sockets

Command = Callable[..., tuple[object, str, str]]

QUICK = ProbeOptions(listen_s=20.0, enough_batches=30, answer_s=5.0)
HASTY = ProbeOptions(listen_s=0.1, enough_batches=30, answer_s=0.3)


@pytest.fixture
def ticking() -> Iterator[Callable[[BoundPublisher], None]]:
    """Let a publisher publish a history on a thread of its own until the test ends, and then close it."""
    over = Event()
    opened: list[BoundPublisher] = []
    threads = ThreadPoolExecutor(4)

    def tick(publisher: BoundPublisher) -> None:
        history, number = ChainEventGenerator(), 0
        while not over.wait(0.002):
            publisher.publish(KVEventBatch(float(number + 1), (history.next(number),)))
            publisher.idle()
            number += 1

    def start(publisher: BoundPublisher) -> None:
        opened.append(publisher)
        threads.submit(tick, publisher)

    yield start
    over.set()
    threads.shutdown()
    for publisher in opened:
        publisher.shutdown()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``scheduler-components conformance``: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["scheduler-components", "conformance", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (ended.value.code, *capsys.readouterr())

    return run


POOL_RULES = ("pool-missing", "pool-extra")  # need an oracle


def open_zmq(rank: int = 0, **options: object) -> ZmqEventPublisher:
    config = KVEventsConfig(bind=True, **options)
    return ZmqEventPublisher(rank, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", config=config)


def broken(report: ConformanceReport) -> list[RuleResult]:
    return [each for stream in report.streams for each in stream.rules if each.status == "broken"]


@pytest.mark.parametrize("options", [{}, {"dialect": "vllm", "replay_framing": "topic", "topic": "kv"}])
def test_the_kits_publisher_conforms(ticking: Callable[[BoundPublisher], None], options: dict[str, object]) -> None:
    publisher = open_zmq(**options)
    ticking(publisher)
    report = check_conformance(
        publisher.endpoint,
        QUICK,
        replay_endpoint=publisher.replay_endpoint,
        topic=str(options.get("topic", "")),
        block_size=BLOCK_SIZE,
    )
    assert broken(report) == []
    assert report.exit_code == 0
    (stream,) = report.streams
    assert {each.rule for each in stream.rules if each.status == "not judged"} <= {"order", *POOL_RULES}
    assert (stream.facts.speaks_extension, stream.facts.knows_history) == (True, True)
    assert stream.facts.live_batches >= QUICK.enough_batches
    text = "\n".join(report.lines())
    assert f"{publisher.endpoint}: conforms" in text
    assert "extended replay yes" in text


def test_a_publisher_with_a_short_window_still_conforms(ticking: Callable[[BoundPublisher], None]) -> None:
    publisher = open_zmq(buffer_steps=5)
    ticking(publisher)
    report = check_conformance(publisher.endpoint, QUICK, replay_endpoint=publisher.replay_endpoint)
    assert broken(report) == []


class Faulty(ScriptedPublisher):
    """Loses every seventh batch for good, and its end markers."""

    def live_messages(self, sequence: int, payload: bytes) -> list[Frames]:
        return [] if sequence % 7 == 6 else super().live_messages(sequence, payload)

    def answer(self, request: bytes) -> list[Frames]:
        return [frames for frames in super().answer(request)[:-1] if int.from_bytes(frames[0], "big") % 7 != 6]


def test_faults_are_told_with_their_hint(ticking: Callable[[BoundPublisher], None]) -> None:
    publisher = Faulty.open()
    ticking(publisher)
    options = ProbeOptions(listen_s=20.0, enough_batches=30, answer_s=0.5)
    report = check_conformance(
        publisher.endpoint, options, replay_endpoint=publisher.replay_endpoint, block_size=BLOCK_SIZE + 1
    )
    assert {"no-gap", "replay-end", "replay-order", "replay-past-end", "block-size"} <= {
        each.rule for each in broken(report)
    }
    text = "\n".join(report.lines())
    assert "ERROR   KVE-703 replay-end: every reply ends with the end marker" in text
    assert "-> always send it" in text
    assert "does NOT conform" in text
    assert report.exit_code == 1
    decoded = json.loads(report.to_json())
    assert decoded["conforms"] is False
    (gap,) = [each for each in decoded["streams"][0]["rules"] if each["rule"] == "no-gap"]
    assert (gap["status"], gap["weight"]) == ("broken", "error")
    assert len(gap["seen"]) <= 3


def test_a_stream_without_replay_conforms_and_its_late_joiners_are_warned_of(
    ticking: Callable[[BoundPublisher], None],
) -> None:
    publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:0", config=KVEventsConfig(bind=True))
    ticking(publisher)
    report = check_conformance(publisher.endpoint, QUICK)
    assert ([each.rule for each in broken(report)], report.exit_code) == (["late-joiner"], 0)
    assert "WARNING KVE-708 late-joiner" in "\n".join(report.lines())


class JoinsLate(ScriptedPublisher):
    """A live connection that comes about some batches after the first replay was answered."""

    def live_messages(self, sequence: int, payload: bytes) -> list[Frames]:
        return super().live_messages(sequence, payload) if self.asked and len(self.sent) > self.joined_at else []

    def answer(self, request: bytes) -> list[Frames]:
        if len(self.asked) == 1:
            self.joined_at = len(self.sent) + 20
        return super().answer(request)

    joined_at = 1 << 30


def test_batches_between_the_first_replay_and_the_first_live_one_are_no_gap(
    ticking: Callable[[BoundPublisher], None],
) -> None:
    publisher = JoinsLate.open()
    ticking(publisher)
    report = check_conformance(publisher.endpoint, QUICK, replay_endpoint=publisher.replay_endpoint)
    assert broken(report) == []
    assert report.streams[0].facts.knows_history


def test_a_silent_stream_does_not_conform() -> None:
    with ScriptedPublisher.open() as publisher:
        report = check_conformance(publisher.endpoint, HASTY, replay_endpoint=publisher.replay_endpoint)
    assert [each.rule for each in broken(report)] == ["speaks", "replay-answers"]


def test_a_closed_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        endpoint = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
    report = check_conformance(endpoint, HASTY)
    assert [each.rule for each in report.engine if each.status == "broken"] == ["reachable"]
    assert "Connection refused" in "\n".join(report.lines())
    assert (report.reachable, report.exit_code) == (False, 3)


def server_info(info: object) -> Pages:
    return {"/server_info": (200, json.dumps(info).encode())}


def test_every_advertised_stream_is_judged(
    ticking: Callable[[BoundPublisher], None], free_ports: Callable[[int], int], serve: Callable[[Pages], str]
) -> None:
    base = free_ports(4)
    config = KVEventsConfig(bind=True)
    for rank in range(2):
        ticking(ZmqEventPublisher(rank, f"tcp://127.0.0.1:{base}", f"tcp://127.0.0.1:{base + 2}", config=config))
    described = {
        "endpoint_host": "127.0.0.1", "endpoint_port_base": base, "replay_endpoint_port_base": base + 2, "dp_size": 2,
        "topic": "", "block_size": BLOCK_SIZE,
    }  # fmt: skip
    report = check_conformance(serve(server_info({"kv_events": described})), QUICK)
    assert [(stream.rank, Endpoint.parse(stream.endpoint).port) for stream in report.streams] == [
        (0, base),
        (1, base + 1),
    ]
    assert broken(report) == []
    assert [each.status for each in report.engine] == ["kept", "kept"]


@pytest.mark.parametrize("info", [{}, {"kv_events": None, "kv_events_error": "unset"}, {"kv_events": {"topic": 5}}, []])
def test_a_bad_descriptor_is_told(info: object, serve: Callable[[Pages], str]) -> None:
    report = check_conformance(serve(server_info(info)), HASTY)
    assert [each.rule for each in report.engine if each.status == "broken"] == ["descriptor"]
    assert (report.exit_code, report.streams) == (1, ())


def test_a_persons_mistakes_are_config_errors() -> None:
    for target in ("localhost:5557", "tcp://*:5557", "udp://a:1"):
        with pytest.raises(ConfigError):
            check_conformance(target)
    with pytest.raises(ConfigError, match="topic='kv': belongs to a bare endpoint"):
        check_conformance("http://127.0.0.1:1", topic="kv")
    with pytest.raises(StartError):
        check_conformance("http://127.0.0.1:1")


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_the_report_and_exits_by_it(
    ticking: Callable[[BoundPublisher], None], as_json: bool, command: Command
) -> None:
    publisher = open_zmq()
    ticking(publisher)
    arguments = [publisher.endpoint, "--replay-endpoint", publisher.replay_endpoint or "", "--batches", "20"]
    status, output, complaint = command(*arguments, *(["--json"] if as_json else []))
    assert (status, complaint) == (0, "")
    assert json.loads(output)["conforms"] if as_json else output.rstrip().endswith(": conforms")


def test_the_command_says_no_by_its_exit_code(command: Command) -> None:
    with ScriptedPublisher.open() as publisher:
        status, output, _ = command(publisher.endpoint, "--listen", "0.1")
    assert status == 1
    assert "ERROR   KVE-201 speaks" in output


@pytest.mark.parametrize("arguments", [["tcp://*:5557"], ["http://127.0.0.1:1", "--topic", "kv"], ["nonsense"], []])
def test_a_mistake_is_one_line_and_exit_code_2(command: Command, arguments: list[str]) -> None:
    status, _, complaint = command(*arguments)
    assert status == 2
    assert complaint.startswith("scheduler-components: ")
    assert complaint.count("\n") == 1
