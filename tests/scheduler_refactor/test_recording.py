"""The first difference of two recordings is named: step, exit, byte, decoded value. Files keep recordings."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components.errors import ConfigError, DecodeError
from scheduler_refactor.recording import (
    Coverage,
    Emission,
    Recording,
    first_difference,
    read_recordings,
    write_recordings,
)


def recording(*emissions: tuple[int, str, bytes], steps: int = 3) -> Recording:
    return Recording(tuple(f"step {n}" for n in range(steps)), tuple(Emission(*each) for each in emissions))


OLD = recording((0, "events", b'{"n": [1, 2]}'), (1, "output", b"abc"), (1, "events", b"{}"))


@pytest.mark.parametrize(
    ("new", "place", "text"),
    [
        (
            recording((0, "events", b'{"n": [1, 3]}'), (1, "output", b"abc"), (1, "events", b"{}")),
            (0, "events", 10),
            "step 0 (step 0), exit 'events', byte 10: old b'{\"n\": [1, 2]}' of 13 bytes, new b'{\"n\": [1, 3]}' of "
            "13 bytes; n[1]: old 2, new 3",
        ),
        (recording((0, "events", b'{"n": [1, 2]}'), (1, "output", b"ab"), (1, "events", b"{}")), (1, "output", 2), ""),
        (
            recording((0, "events", b'{"n": [1, 2]}'), (1, "events", b"{}"), (1, "output", b"abc")),
            (1, "output", 0),
            "the same emissions in another order: old goes on with 'output', 'events', new with 'events', 'output'",
        ),
        (recording((0, "events", b'{"n": [1, 2]}'), (1, "events", b"{}")), (1, "output", 0), "new with 'events'"),
        (recording((0, "events", b'{"n": [1, 2]}')), (1, "output", 0), "new with nothing"),
        (recording((0, "output", b"abc"), (1, "events", b"{}")), (0, "events", 0), "old goes on with 'events'"),
        (
            recording((0, "events", b'{"n":[1,2]}'), (1, "output", b"abc"), (1, "events", b"{}")),
            (0, "events", 5),
            "the decoded values are equal",
        ),
        (
            recording((0, "events", b'{"n": [1, 2.0]}'), (1, "output", b"abc"), (1, "events", b"{}")),
            (0, "events", 11),
            "n[1]: old 2, new 2.0",
        ),
        (
            recording((0, "events", b"?"), (1, "output", b"abc"), (1, "events", b"{}")),
            (0, "events", 0),
            "the decoder failed",
        ),
    ],
)
def test_the_first_difference_is_named(new: Recording, place: tuple[int, str, int], text: str) -> None:
    found = first_difference(OLD, new, {"events": json.loads})
    assert found is not None
    assert (found.step, found.exit, found.offset) == place
    assert text in str(found)


def test_other_steps_are_a_difference() -> None:
    found = first_difference(recording(steps=1), recording(steps=2))
    assert found is not None
    assert (found.step, found.problem) == (1, "old has no step, new has 'step 1'")


def test_an_earlier_extra_emission_of_the_new_side_is_the_place() -> None:
    found = first_difference(recording((2, "events", b"x")), recording((1, "events", b"x"), (2, "events", b"x")))
    assert found is not None
    assert (found.step, found.old, found.new) == (1, b"x", b"x")


payloads = st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.binary(max_size=4))


@given(st.lists(payloads, max_size=6), st.lists(payloads, max_size=6))
def test_a_difference_is_found_exactly_if_there_is_one(
    old: list[tuple[int, str, bytes]], new: list[tuple[int, str, bytes]]
) -> None:
    one, other = recording(*sorted(old)), recording(*sorted(new))
    found = first_difference(one, other)
    assert (found is None) == (one == other)
    if found is not None:
        equal = [mine == theirs for mine, theirs in zip(one.emissions, other.emissions, strict=False)]
        first = [*equal, False].index(False)
        assert found.step == min(each[first].step for each in (one.emissions, other.emissions) if len(each) > first)


def test_recordings_survive_a_file(tmp_path: Path) -> None:
    file = tmp_path / "old.rec"
    write_recordings(file, [[1, "x"]], [OLD])
    found = read_recordings(file)
    assert found.recordings == (OLD,)
    assert msgspec.msgpack.decode(found.workloads[0]) == [1, "x"]


@pytest.mark.parametrize(
    "content", [b"", b"text", msgspec.msgpack.encode({"version": 9, "workloads": [], "recordings": []})]
)
def test_another_file_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "old.rec"
    file.write_bytes(content)
    with pytest.raises(DecodeError, match=r"old\.rec"):
        read_recordings(file)


def test_files_and_workloads_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recordings(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_recordings(tmp_path, [], [])
    with pytest.raises(ConfigError, match="cannot be encoded"):
        write_recordings(tmp_path / "x", [object()], [OLD])


def test_coverage_names_what_stayed_silent() -> None:
    coverage = Coverage()
    coverage.add(msgspec.structs.replace(OLD, reached=("abort",)))
    assert coverage.missing(["events", "metrics"], ["abort", "eviction"]) == [
        "exit 'metrics' stayed silent",
        "no workload reached 'eviction'",
    ]
    assert list(coverage.lines()) == [
        "1 workloads",
        "  exit events: 2 payloads, 15 bytes",
        "  exit output: 1 payloads, 3 bytes",
        "  reached abort: 1 workloads",
    ]
