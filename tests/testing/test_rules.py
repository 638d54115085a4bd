"""The specification equals the checks: ids, tables, fields, golden bytes, and the check of each rule."""

from __future__ import annotations

import importlib.util
import re
import typing
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from scheduler_components import testing
from scheduler_components.events import WIRE_EVENTS
from scheduler_components.testing.golden import NamespacedHashVector, namespaced_hash_vectors
from scheduler_components.testing.rules import RULES, SPECIFICATION, Chapter

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "docs" / "spec"
PAGES = sorted(SPEC.glob("*.md"))


def load_writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_spec", ROOT / "docs" / "make_spec.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WRITER = load_writer()


def name(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_each_page_equals_the_generated_one(page: Path) -> None:
    """Else run ``make generated``."""
    assert WRITER.write(page.read_text()) == page.read_text()


def test_the_specification_contains_exactly_the_ids_of_the_rules() -> None:
    chapters = "".join((SPEC / page).read_text() for page in WRITER.PAGES)
    assert re.findall(r"^\| (KVE-\d+) `", chapters, re.MULTILINE) != []
    assert sorted(re.findall(r"^\| (KVE-\d+) `", chapters, re.MULTILINE)) == sorted(rule.id for rule in SPECIFICATION)
    everywhere = {each for page in PAGES for each in re.findall(r"KVE-\d+", page.read_text())}
    assert everywhere == {rule.id for rule in SPECIFICATION}


def test_every_chapter_has_a_heading_on_its_page() -> None:
    assert {each for chapters in WRITER.PAGES.values() for each in chapters} == set(typing.get_args(Chapter))
    for page, chapters in WRITER.PAGES.items():
        headings = re.findall(r"^## (\w+)$", (SPEC / page).read_text(), re.MULTILINE)
        assert [each.lower() for each in headings] == list(chapters)


def test_ids_and_names_are_given_once_and_chapters_follow_from_ids() -> None:
    assert len({rule.id for rule in SPECIFICATION}) == len({rule.name for rule in SPECIFICATION}) == len(SPECIFICATION)
    assert set(RULES.values()) == {rule for rule in SPECIFICATION if rule.verified_by == "conformance"}
    assert all(re.fullmatch(r"KVE-\d{3,4}", rule.id) and rule.chapter for rule in SPECIFICATION)


def test_the_named_check_of_each_rule_exists() -> None:
    for rule in SPECIFICATION:
        judge, _, what = rule.verified_by.partition(": ")
        if judge.endswith("_CHECKS"):
            assert what in [check.__name__ for check in getattr(testing, judge)], rule.id
        elif judge != "conformance":
            assert f"def {what}(" in (ROOT / judge).read_text(), rule.id


def test_each_rule_has_a_statement_a_harm_and_a_repair() -> None:
    for rule in SPECIFICATION:
        for text in (rule.holds, rule.harms, rule.hint):
            assert 3 < len(text) < 130, rule.id
            assert not text.endswith("."), rule.id


def test_every_declared_field_is_described_in_its_place() -> None:
    for event in WIRE_EVENTS:
        declared = [field.name for field in msgspec.structs.fields(event)]
        assert declared == list(WRITER.FIELD_FACTS[event.__name__])[: len(declared)]


def test_every_generated_block_of_a_page_exists() -> None:
    asked = [(page, line) for page in PAGES for line in page.read_text().splitlines() if line.startswith("<!-- ")]
    for page, line in asked:
        made = WRITER.write(f"{line}\n<!-- end -->")
        assert line == "<!-- end -->" or len(made.splitlines()) > 4, f"{page.name}: {line} is not known"


def seed_of(extra_key: str | None, cache_salt: str | None) -> bytes:
    """As the specification says it."""
    if extra_key is None and cache_salt is None:
        return b""
    seed = b"sglang-kv-event-namespace-v1"
    for part in (extra_key, cache_salt):
        text = (part or "").encode()
        seed += b"\0" if part is None else b"\1" + len(text).to_bytes(8, "little") + text
    return sha256(seed).digest()


@pytest.mark.parametrize("vector", namespaced_hash_vectors(), ids=str)
def test_namespaced_hashes_follow_the_specification(vector: NamespacedHashVector) -> None:
    seed = seed_of(vector.extra_key, vector.cache_salt)
    assert seed.hex() == vector.seed
    digest = sha256(seed + vector.block_hash.to_bytes(8, "big", signed=True)).digest()
    wanted = int.from_bytes(digest[:8], "big", signed=True) if seed else vector.block_hash
    assert vector.namespaced_hash == wanted
