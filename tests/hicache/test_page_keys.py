"""Each slice of a page has one key and one writer."""

from __future__ import annotations

from collections import Counter, defaultdict
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples

from scheduler_components import ConfigError, ParallelState
from scheduler_components.hicache import KeySpace, Placement
from scheduler_components.hicache.page_keys import AXES
from scheduler_components.hicache.storage import frame_page

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


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(3))
@given(pp=SIZES, dp=SIZES, cp=SIZES, tp=SIZES, placement=PLACEMENTS)
@example(pp=1, dp=1, cp=2, tp=2, placement=Placement(attn_tp="replicated", attn_cp="replicated"))
@example(pp=1, dp=1, cp=2, tp=2, placement=Placement(attn_tp="sharded", attn_cp="sharded"))
def test_each_key_has_one_slice_and_one_writer_per_replica(
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


@pytest.mark.soak
@settings(deadline=None, max_examples=num_examples(3))
@given(one=st.tuples(SIZES, SIZES, SIZES, PLACEMENTS), other=st.tuples(SIZES, SIZES, SIZES, PLACEMENTS))
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


def test_keys_are_readable() -> None:
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
        assert str(caught.value) == f"{field}='': is empty; give a name"


def test_an_invalid_placement_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Placement(attn_cp="somewhere")  # type: ignore[arg-type]
    assert str(caught.value) == "attn_cp='somewhere': is not a placement; give one of replicated, sharded"
    parallel = ParallelState.from_tp_rank(0, tp_size=4, dcp_size=2)
    with pytest.raises(ConfigError) as caught:
        key_space(parallel, Placement.mla())
    assert str(caught.value) == (
        "placement.attn_tp='replicated': does not work with dcp_size=2, which shards pages over attn_tp; "
        'give "sharded"'
    )


def test_a_short_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        key_space(ParallelState()).key(b"8 bytes.")
