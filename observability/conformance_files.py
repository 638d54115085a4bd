"""Convert a conformance report to JUnit XML for CI."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree as Xml

from observability.conformance import ConformanceReport, RuleResult
from observability.kv_stream import escape_unprintable

__all__ = ["junit_xml"]


def junit_xml(report: ConformanceReport) -> str:
    """Return JUnit XML: a suite for the engine and one for each stream, and in them one test case per rule.

    A broken rule of weight ``error`` is a failure. One of weight ``warning`` passes with a note in its output, because
    JUnit has no warnings. A rule that was not judged is skipped.
    """
    suites = [("engine", report.engine)]
    suites += [(f"stream {each.rank} {each.endpoint}", each.rules) for each in report.streams]
    root = Xml.Element("testsuites", _counts("KV events conformance", [each for _, rules in suites for each in rules]))
    for name, rules in suites:
        suite = Xml.SubElement(root, "testsuite", _counts(escape_unprintable(name), rules))
        for rule in rules:
            _add_case(suite, rule, classname=f"{escape_unprintable(report.target)} {escape_unprintable(name)}")
    Xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + Xml.tostring(root, encoding="unicode") + "\n"


def _counts(name: str, rules: Iterable[RuleResult]) -> dict[str, str]:
    rules = tuple(rules)
    failed = sum(each.status == "broken" and each.weight == "error" for each in rules)
    skipped = sum(each.status == "not judged" for each in rules)
    return {"name": name, "tests": str(len(rules)), "failures": str(failed), "errors": "0", "skipped": str(skipped)}


def _add_case(suite: Xml.Element, rule: RuleResult, *, classname: str) -> None:
    case = Xml.SubElement(suite, "testcase", {"classname": classname, "name": f"{rule.id} {rule.rule}", "time": "0"})
    if rule.status == "not judged":
        Xml.SubElement(case, "skipped", {"message": "nothing came that could break it"})
    elif rule.status == "broken":
        is_failure = rule.weight == "error"
        kind, marks = ("failure", {"type": rule.rule, "message": rule.holds}) if is_failure else ("system-out", {})
        lines = [f"{rule.weight}: {rule.holds}; broken {rule.count} times", *map(escape_unprintable, rule.seen)]
        Xml.SubElement(case, kind, marks).text = "\n".join([*lines, f"harm: {rule.harms}", f"repair: {rule.hint}"])
