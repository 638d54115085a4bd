"""The judgement of an engine as a person reads it, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from observability.kv_stream.discovery import StreamAddress
from observability.terminal_text import printable
from scheduler_components.testing.conformance.stream_judge import StreamFacts, StreamVerdict
from scheduler_components.testing.wire_rules import RULES, Violation, Weight

__all__ = ["ConformanceReport", "RuleResult", "StreamReport", "report_stream"]

_MAX_SEEN = 3
_EXTENSION = {True: "yes", False: "no", None: "not asked"}
_FRAMINGS = {2: "seed", 3: "topic"}
_ENGINE_RULES = ("descriptor", "reachable")


class RuleResult(msgspec.Struct, frozen=True):
    """One rule on one stream.

    Attributes:
        rule, weight, holds, mend: of ``wire_rules``.
        status: ``kept``, ``broken``, or ``not judged``: nothing came that could have broken it.
        count: how often it was broken; seen: the first few times, in words.
    """

    rule: str
    status: str
    weight: str
    holds: str
    mend: str
    count: int = 0
    seen: tuple[str, ...] = ()


class StreamReport(msgspec.Struct, frozen=True):
    """One stream: what was seen of it, and every rule."""

    rank: int
    endpoint: str
    facts: StreamFacts
    rules: tuple[RuleResult, ...]


class ConformanceReport(msgspec.Struct, frozen=True):
    """All streams of one target.

    Attributes:
        target: as the person gave it.
        conforms: no rule of weight ``error`` is broken anywhere.
        engine: the rules of the engine as a whole.
        streams: one report a stream.
    """

    target: str
    conforms: bool
    engine: tuple[RuleResult, ...]
    streams: tuple[StreamReport, ...]

    @classmethod
    def of(
        cls, target: str, judged: Iterable[str], broken: Iterable[Violation], streams: Iterable[StreamReport]
    ) -> ConformanceReport:
        """Put the parts together."""
        engine = tuple(each for each in _results(tuple(broken), frozenset(judged)) if each.rule in _ENGINE_RULES)
        reports = tuple(streams)
        results = [*engine, *(each for report in reports for each in report.rules)]
        conforms = not any(each.status == "broken" and each.weight == Weight.ERROR for each in results)
        return cls(target, conforms, engine, reports)

    @property
    def exit_code(self) -> int:
        """0 conforms, warnings or not; 1 does not."""
        return 0 if self.conforms else 1

    def to_json(self) -> str:
        """One JSON object, indented, of these very fields."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    def lines(self) -> Iterator[str]:
        """The report for a terminal: per stream what was seen, what is broken with its mend, and the counts."""
        yield from _told(self.engine)
        for stream in self.streams:
            yield f"stream {stream.rank}  {printable(stream.endpoint)}"
            yield from (f"  {line}" for line in _facts(stream.facts))
            yield from (f"  {line}" for line in _told(stream.rules))
            kept = sum(each.status == "kept" for each in stream.rules)
            unjudged = ", ".join(each.rule for each in stream.rules if each.status == "not judged")
            yield f"  {kept} rules kept" + (f"; not judged, for nothing came to judge: {unjudged}" if unjudged else "")
        yield f"{printable(self.target)}: " + ("conforms" if self.conforms else "does NOT conform")


def report_stream(address: StreamAddress, verdict: StreamVerdict) -> StreamReport:
    """Put a verdict beside every rule of the table."""
    results = tuple(each for each in _results(verdict.violations, verdict.judged) if each.rule not in _ENGINE_RULES)
    return StreamReport(address.rank, str(address.events), verdict.facts, results)


def _results(violations: tuple[Violation, ...], judged: frozenset[str]) -> Iterator[RuleResult]:
    seen: dict[str, list[str]] = {}
    for violation in violations:
        seen.setdefault(violation.rule, []).append(violation.seen)
    for name, rule in RULES.items():
        times = seen.get(name, [])
        status = "broken" if times else "kept" if name in judged else "not judged"
        yield RuleResult(name, status, rule.weight, rule.holds, rule.mend, len(times), tuple(times[:_MAX_SEEN]))


def _told(results: Iterable[RuleResult]) -> Iterator[str]:
    for result in results:
        if result.status != "broken":
            continue
        yield f"{result.weight.upper():<7} {result.rule}: {result.holds}; broken {result.count} times"
        yield from (f"          {printable(seen)}" for seen in result.seen)
        yield f"          -> {result.mend}"


def _facts(facts: StreamFacts) -> Iterator[str]:
    yield (
        f"{facts.live_batches} batches live and {facts.replayed_batches} more by replay, {facts.events} events, "
        f"numbers {facts.first_sequence} to {facts.last_sequence}; {facts.blocks} blocks stand"
    )
    framing = " and ".join(_FRAMINGS[count] for count in facts.replay_frames) or "unseen"
    chain = "unseen"
    if facts.chained_blocks:
        kept = facts.chained_blocks - facts.off_chain_blocks
        chain = f"{kept} of {facts.chained_blocks} blocks on SGLang's page chain"
    yield (
        f"dialect {'+'.join(facts.dialects) or 'unseen'}; replay framing {framing}; extended replay "
        f"{_EXTENSION[facts.speaks_extension]}; hashes: {chain}"
    )
    if not facts.knows_history:
        yield "the stream's beginning is gone: what refers to it (orphans, unknown removals) could not be judged"
