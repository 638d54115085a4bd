"""The report as JUnit XML: well-formed whatever a peer sends, one test case per rule and stream."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as Xml

from hypothesis import given
from hypothesis import strategies as st
from kit.command_line import CommandLine, command_line

from observability.conformance import ConformanceReport, StreamReport, build_stream_report
from observability.conformance_files import junit_xml
from scheduler_components.kv_events import Endpoint, StreamAddress
from scheduler_components.testing import ScriptedPublisher
from scheduler_components.testing.rules import RULES, Violation
from scheduler_components.testing.stream_verifier import StreamFacts, StreamVerdict

__all__ = ["command_line"]  # the fixture

ENGINE_RULES = ("descriptor", "reachable")


def stream_of(rank: int, judged: set[str], *violations: Violation) -> StreamReport:
    address = StreamAddress(rank=rank, events=Endpoint.parse(f"tcp://worker:{5557 + rank}"))
    return build_stream_report(address, StreamVerdict(StreamFacts(), violations, frozenset(judged)))


def report_of(*streams: StreamReport, reachable: bool = True) -> ConformanceReport:
    return ConformanceReport.of("http://worker:30000", ENGINE_RULES, (), streams, reachable=reachable)


SOUND = stream_of(0, {"order", "event"})
TAPE = Violation("medium", "medium 'TAPE'")
BROKEN = stream_of(1, {"order", "event", "medium"}, Violation("order", "number 3 after 4"), TAPE)


def test_each_rule_of_each_stream_is_one_test_case_with_its_id() -> None:
    root = Xml.fromstring(junit_xml(report_of(SOUND, BROKEN)))
    suites = {suite.get("name", ""): suite for suite in root}
    assert list(suites) == ["engine", "stream 0 tcp://worker:5557", "stream 1 tcp://worker:5558"]
    names = [case.get("name") for suite in suites.values() for case in suite]
    per_stream = [f"{rule.id} {name}" for name, rule in RULES.items() if name not in ENGINE_RULES]
    assert names == [f"{RULES[name].id} {name}" for name in ENGINE_RULES] + per_stream * 2
    keys = ("tests", "failures", "skipped")
    assert [suite.get(key) for suite in root for key in keys] == [
        "2", "0", "0", str(len(per_stream)), "0", str(len(per_stream) - 2), str(len(per_stream)), "1",
        str(len(per_stream) - 3),
    ]  # fmt: skip
    assert root.get("tests") == str(2 + 2 * len(per_stream))


def test_an_error_fails_a_warning_passes_with_words_and_what_was_not_judged_is_skipped() -> None:
    cases = {case.get("name"): case for case in Xml.fromstring(junit_xml(report_of(BROKEN))).iter("testcase")}
    (failure,) = cases["KVE-202 order"]
    assert (failure.tag, failure.get("type"), failure.get("message")) == ("failure", "order", RULES["order"].holds)
    assert "number 3 after 4" in (failure.text or "")
    assert RULES["order"].harms in (failure.text or "")
    (words,) = cases["KVE-601 medium"]
    assert words.tag == "system-out"
    assert [part.tag for part in cases["KVE-703 replay-end"]] == ["skipped"]
    assert list(cases["KVE-304 event"]) == []


@given(seen=st.text(), target=st.text())
def test_it_is_well_formed_whatever_a_peer_sends(seen: str, target: str) -> None:
    report = ConformanceReport.of(target, (), (), (stream_of(0, set(), Violation("event", seen)),))
    assert Xml.fromstring(junit_xml(report).encode()).tag == "testsuites"


def test_the_command_writes_the_file(command_line: CommandLine, tmp_path: Path) -> None:
    junit = tmp_path / "conformance.xml"
    with ScriptedPublisher.open() as publisher:
        ran = command_line("conformance", publisher.endpoint, "--listen", "0.1", "--junit", str(junit))
    assert (ran.code, ran.err) == (1, "")
    assert int(Xml.parse(junit).getroot().get("failures", "0")) >= 1


def test_a_file_that_cannot_be_written_is_told_before_anybody_listens(
    command_line: CommandLine, tmp_path: Path
) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "file"):
        ran = command_line("conformance", "tcp://127.0.0.1:1", "--junit", str(path))
        assert ran.code == 2
        assert ran.complaint.startswith("junit=")
