"""Relays that are broken on purpose. Each function breaks one rule of the real cores for the rest of a test."""

from __future__ import annotations

import pytest

from observability.kv_stream import StreamState
from observability.relay import source_merger
from observability.relay.block_set import BlockSet
from observability.relay.source_merger import Events, SourceMerger
from observability.relay.stream import RelayedStream, SourceListener
from scheduler_components import AllBlocksCleared
from scheduler_components.kv_events import EventStream


def a_clear_after_a_restart_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SourceListener, "on_view_cleared", lambda *_: None)


def partial_is_published_as_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SourceMerger, "upstream", property(lambda _: None))


def the_best_source_sets_the_state(patch: pytest.MonkeyPatch) -> None:
    def best(self: SourceMerger) -> str | None:
        return None if any(each.state is StreamState.LIVE for each in self._sources.values()) else "partial"

    patch.setattr(SourceMerger, "upstream", property(best))


def the_end_of_a_doubt_is_not_published(patch: pytest.MonkeyPatch) -> None:
    def send_doubts(self: RelayedStream) -> None:
        if self.merger.upstream is not None:
            for sink in self.sinks:
                sink.set_upstream_state(self.merger.upstream)

    patch.setattr(RelayedStream, "send_upstream_state", send_doubts)


def the_begin_of_a_snapshot_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SourceListener, "on_snapshot_begin", lambda *_: None)


def a_cut_snapshot_stays(patch: pytest.MonkeyPatch) -> None:
    right = SourceListener.on_snapshot_end

    def ended(self: SourceListener, rank: int, *, was_used: bool) -> None:
        if was_used:
            right(self, rank, was_used=True)

    patch.setattr(SourceListener, "on_snapshot_end", ended)


def the_base_does_not_begin_with_a_clear(patch: pytest.MonkeyPatch) -> None:
    right = EventStream.encode_chunk
    patch.setattr(EventStream, "encode_chunk", lambda *args, clear: right(*args, clear=False))


def a_source_forgotten_during_its_snapshot_leaves_blocks(patch: pytest.MonkeyPatch) -> None:
    """The defect of 0.4: the blocks of the unfinished snapshot stay published, and no source holds them."""
    remove_source = SourceMerger.remove_source

    def remove(self: SourceMerger, key: int) -> Events:
        source = self._sources.get(key)
        if source is not None:
            source.staged = None
        return remove_source(self, key)

    patch.setattr(SourceMerger, "remove_source", remove)


def a_lost_source_keeps_its_unfinished_snapshot(patch: pytest.MonkeyPatch) -> None:
    def lose(self: SourceMerger, key: int) -> Events:
        self._source(key).state = StreamState.CONNECTING
        return ()

    patch.setattr(SourceMerger, "on_source_lost", lose)


# --- the merger alone ---


def a_restart_forgets_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SourceMerger, "on_view_cleared", lambda *_: ())


def a_clear_of_one_source_clears_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SourceMerger, "_remove_unheld", lambda *_: (AllBlocksCleared(),))


def a_removal_counts_for_all_sources(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SourceMerger, "_is_held", lambda *_: False)


def a_snapshot_replaces_nothing(patch: pytest.MonkeyPatch) -> None:
    def ended(self: SourceMerger, key: int, *, was_used: bool) -> tuple[()]:
        source = self._sources[key]
        for place, blocks in (source.staged or {}).items():
            source.held.setdefault(place, BlockSet()).update(blocks)
        source.staged = None
        return ()

    patch.setattr(SourceMerger, "on_snapshot_end", ended)


def a_cut_snapshot_is_kept(patch: pytest.MonkeyPatch) -> None:
    right = SourceMerger.on_snapshot_end
    patch.setattr(SourceMerger, "on_snapshot_end", lambda self, key, *, was_used: right(self, key, was_used=True))


def a_snapshot_is_applied_to_the_view(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SourceMerger, "on_snapshot_begin", lambda *_: None)


def media_are_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(source_merger, "location_of", lambda *_: ("GPU", None, None, None))
