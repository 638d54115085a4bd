"""Frames, checks and keys: the right page or a counted miss, from keys that one rank per slice writes."""

from __future__ import annotations

from collections import Counter, defaultdict
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import ConfigError, ParallelState
from scheduler_components.hicache import (
    CheckedPageStore,
    KeySpace,
    MemoryPageStore,
    Placement,
    StorageError,
    StorageStallError,
)
from scheduler_components.hicache.storage import AXES, FRAME_BYTES, frame_page, unframe_page

PAGE = sha256(b"page").digest()
HELD = st.sampled_from(["replicated", "sharded"])
PLACEMENTS = st.builds(Placement, attn_tp=HELD, attn_cp=HELD, pp=HELD)
SIZES = st.integers(1, 3)


def key_space(parallel: ParallelState, placement: Placement | None = None, **overrides: Any) -> KeySpace:
    facts: dict[str, Any] = {
        "model": "org/model",
        "dtype": "bf16",
        "page_size": 64,
        "layout": "page_first",
        **overrides,
    }
    return KeySpace(**facts, placement=placement or Placement(), parallel=parallel)


def engine(pp: int, dp: int, cp: int, tp: int) -> list[ParallelState]:
    return [
        ParallelState.from_tp_rank(
            rank, tp_size=dp * cp * tp, attn_dp_size=dp, attn_cp_size=cp, pp_rank=stage, pp_size=pp
        )
        for stage in range(pp)
        for rank in range(dp * cp * tp)
    ]


def slice_of(parallel: ParallelState, placement: Placement) -> tuple[tuple[str, int, int], ...]:
    """What a rank holds of a page, said without KeySpace: its place on each axis that cuts the page."""
    cuts = ((axis, getattr(parallel, f"{axis}_rank"), getattr(parallel, f"{axis}_size")) for axis in AXES)
    return tuple(cut for cut in cuts if getattr(placement, cut[0]) == "sharded" and cut[2] > 1)


@settings(deadline=None, max_examples=150)
@given(pp=SIZES, dp=SIZES, cp=SIZES, tp=SIZES, placement=PLACEMENTS)
@example(pp=1, dp=1, cp=2, tp=2, placement=Placement(attn_tp="replicated", attn_cp="replicated"))
@example(pp=1, dp=1, cp=2, tp=2, placement=Placement(attn_tp="sharded", attn_cp="sharded"))
def test_a_key_is_a_slice_and_has_one_writer_a_replica(
    pp: int, dp: int, cp: int, tp: int, placement: Placement
) -> None:
    slices: dict[str, set[object]] = defaultdict(set)
    keys: dict[object, set[str]] = defaultdict(set)
    writers: Counter[tuple[int, str]] = Counter()
    read: set[tuple[int, str]] = set()
    for parallel in engine(pp, dp, cp, tp):
        space = key_space(parallel, placement)
        key = space.key(PAGE)
        slices[key].add(slice_of(parallel, placement))
        keys[slice_of(parallel, placement)].add(key)
        writers[parallel.attn_dp_rank, key] += space.is_writer
        read.add((parallel.attn_dp_rank, key))
    assert all(len(held) == 1 for held in slices.values())
    assert all(len(named) == 1 for named in keys.values())
    assert {replica_key: writers[replica_key] for replica_key in read} == dict.fromkeys(read, 1)


@settings(deadline=None, max_examples=150)
@given(
    one=st.tuples(SIZES, SIZES, SIZES, PLACEMENTS),
    other=st.tuples(SIZES, SIZES, SIZES, PLACEMENTS),
)
def test_engines_of_different_shape_share_a_key_only_for_the_same_slice(
    one: tuple[int, int, int, Placement], other: tuple[int, int, int, Placement]
) -> None:
    slices: dict[str, set[object]] = defaultdict(set)
    for pp, cp, tp, placement in (one, other):
        for parallel in engine(pp, 1, cp, tp):
            slices[key_space(parallel, placement).key(PAGE)].add(slice_of(parallel, placement))
    assert all(len(held) == 1 for held in slices.values())


FIELDS = st.tuples(st.text(min_size=1), st.text(min_size=1), st.integers(1, 999), st.text(min_size=1))


@settings(deadline=None)
@given(one=FIELDS, other=FIELDS)
@example(one=("a", "b1", 1, "c"), other=("a", "b", 11, "c"))
@example(one=("a/b", "c", 1, "d"), other=("a-b", "c", 1, "d"))
def test_namespaces_differ_when_any_part_does(one: tuple[str, str, int, str], other: tuple[str, str, int, str]) -> None:
    names = ("model", "dtype", "page_size", "layout")
    first, second = (
        key_space(ParallelState(), **dict(zip(names, fields, strict=True))).namespace for fields in (one, other)
    )
    assert (first == second) == (one == other)
    assert "/" not in first


def test_pages_of_an_older_version_are_found() -> None:
    """Stores outlive engines: neither the key nor the frame of a page may change."""
    keys = key_space(ParallelState(), model="org/some model/v1 \xe9", dtype="bf16", page_size=64, layout="page_first")
    assert keys.key(bytes(range(16))) == "v1--8c822498f11215eea93c5345f6e05ae5/000102030405060708090a0b0c0d0e0f"
    assert keys.namespace != key_space(ParallelState(), model="org/some model/v1 \xe9", page_size=32).namespace
    sealed = frame_page("key \xe9", b"page")
    assert sealed.hex() == "4b56503100000000000000042fa09f2aa14b1b5e310e2b88779a8ec870616765"
    long = key_space(ParallelState(), model="m" * 60).namespace
    assert long.partition("-")[0] == "m" * 40


def test_keys_read_well() -> None:
    parallel = engine(1, 1, 2, 2)[3]
    assert key_space(parallel).suffix == ".attn_tp1of2"
    assert key_space(parallel, Placement.mla()).suffix == ""
    assert key_space(parallel, Placement(attn_cp="sharded")).suffix == ".attn_tp1of2.attn_cp1of2"
    assert key_space(parallel).key(PAGE).startswith("model-")


@pytest.mark.parametrize(
    ("facts", "field"),
    [({"model": ""}, "model"), ({"dtype": ""}, "dtype"), ({"layout": ""}, "layout"), ({"page_size": 0}, "page_size")],
)
def test_an_empty_part_is_refused(facts: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        key_space(ParallelState(), **facts)
    if field == "page_size":
        assert str(caught.value).startswith("page_size=0: is not a page size")
    else:
        assert str(caught.value) == f"{field}='': is empty; name what the pages hold"


def test_a_placement_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Placement(attn_cp="somewhere")  # type: ignore[arg-type]
    assert str(caught.value) == 'attn_cp=\'somewhere\': is not a placement; give "replicated" or "sharded"'
    parallel = ParallelState.from_tp_rank(0, tp_size=4, dcp_size=2)
    with pytest.raises(ConfigError) as caught:
        key_space(parallel, Placement.mla())
    assert str(caught.value) == (
        "placement.attn_tp='replicated': cannot be with dcp_size=2: decode context parallelism slices pages over it; "
        'give "sharded"'
    )


def test_a_short_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        key_space(ParallelState()).key(b"8 bytes.")


PAGE_BYTES = 8
KEYS = ["a", "b"]
PAGES = {key: key.encode() * PAGE_BYTES for key in KEYS}


class SayingStore:
    """Answers everything with one object, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def _say(self, *_: object) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    batch_exists = batch_get = batch_set = delete = close = _say


SEALED = st.sampled_from([frame_page(key, page) for key, page in PAGES.items()])
PARTS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.text(max_size=3)
    | st.binary(max_size=FRAME_BYTES + PAGE_BYTES - 1)  # a whole frame would be a forgery, which no checksum finds
    | SEALED
    | st.builds(lambda sealed, at: sealed[:at], SEALED, st.integers(0, 30))
    | st.builds(frame_page, st.sampled_from(KEYS), st.binary(max_size=12).filter(lambda page: len(page) != PAGE_BYTES))
)
ERRORS = st.sampled_from(
    [StorageError("net", "op", "gone"), StorageStallError("net", "op", "slow"), OSError(5, "io"), KeyError("x")]
)


@settings(deadline=None, max_examples=300)
@given(answer=PARTS | st.lists(PARTS, max_size=3) | st.tuples(PARTS, PARTS) | ERRORS)
@example(answer=[frame_page("b", PAGES["b"]), frame_page("a", PAGES["a"])])  # swapped
@example(answer=[frame_page("a", PAGES["a"])])  # half
@example(answer=[frame_page("a", b"short"), None])
@example(answer=3)
def test_any_answer_is_the_right_page_or_a_counted_miss(answer: object) -> None:
    store = CheckedPageStore(store=SayingStore(answer), page_bytes=PAGE_BYTES)
    got = store.batch_get(KEYS)
    assert len(got) == 2
    for key, page in zip(KEYS, got, strict=True):
        assert page is None or bytes(page) == PAGES[key]
    stats = store.stats()
    num_hit = sum(page is not None for page in got)
    assert (stats.pages_hit, stats.pages_missed) == (num_hit, 2 - num_hit)
    if num_hit == 0 and answer not in ([None, None], (None, None)):
        assert stats.stalls + stats.failures + stats.bad_answers + stats.pages_corrupt > 0
    assert 0 <= store.batch_exists(KEYS) <= 2
    assert len(store.batch_set(KEYS, [PAGES[key] for key in KEYS])) == 2
    assert 0 <= store.delete(KEYS) <= 2
    store.close()


@pytest.mark.parametrize(
    ("answer", "counted", "problem"),
    [
        (StorageStallError("net", "batch_exists", "slow"), "stalls", "net batch_exists: slow"),
        (OSError("broken"), "failures", "batch_exists: OSError: broken"),
        (-1, "bad_answers", "batch_exists: -1 of 2 keys"),
        ("many", "bad_answers", "batch_exists: 'many' of 2 keys"),
    ],
)
def test_what_went_wrong_is_counted_and_said(answer: object, counted: str, problem: str) -> None:
    store = CheckedPageStore(store=SayingStore(answer), page_bytes=PAGE_BYTES)
    assert store.batch_exists(KEYS) == 0
    assert getattr(store.stats(), counted) == 1
    assert store.stats().last_problem == problem


def test_each_operation_says_its_name_when_it_goes_wrong() -> None:
    failing = CheckedPageStore(store=SayingStore(OSError("broken")), page_bytes=PAGE_BYTES)
    pages = [PAGES[key] for key in KEYS]
    asked = {
        "batch_get": lambda: failing.batch_get(KEYS),
        "batch_set": lambda: failing.batch_set(KEYS, pages),
        "delete": lambda: failing.delete(KEYS),
        "close": failing.close,
    }
    for name, ask in asked.items():
        ask()
        assert failing.stats().last_problem == f"{name}: OSError: broken"
    odd = CheckedPageStore(store=SayingStore("many"), page_bytes=PAGE_BYTES)
    odd.batch_get(KEYS)
    assert odd.stats().last_problem == "batch_get: str instead of one answer per key for 2 keys"


@settings(deadline=None, max_examples=200)
@given(key=st.text(max_size=5), page=st.binary(max_size=40), data=st.data())
def test_a_frame_opens_only_as_it_was_sealed(key: str, page: bytes, data: st.DataObject) -> None:
    sealed = frame_page(key, page)
    assert len(sealed) == FRAME_BYTES + len(page)
    assert unframe_page(key, sealed) == page
    assert unframe_page(key + "x", sealed) is None
    cut = data.draw(st.integers(0, len(sealed) - 1))
    assert unframe_page(key, sealed[:cut]) is None
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    changed = bytearray(sealed)
    changed[bit // 8] ^= 1 << bit % 8
    assert unframe_page(key, changed) is None


@pytest.mark.parametrize(("keys", "pages"), [(["a"], []), (["a"], [b"short"])])
def test_a_callers_mistake_is_raised(keys: list[str], pages: list[bytes]) -> None:
    store = CheckedPageStore(store=MemoryPageStore(1000), page_bytes=PAGE_BYTES)
    with pytest.raises(ValueError, match="one page of 8 bytes per key"):
        store.batch_set(keys, pages)
