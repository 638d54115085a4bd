"""A cursor of a publisher with the replay extension, and the answers of that publisher."""

from __future__ import annotations

from observability.kv_stream import StreamCursor, StreamState
from observability.kv_stream.digest_cursor import NO_EPOCH, Position
from observability.kv_stream.instructions import (
    ApplyStaged,
    Instruction,
    SendReplayRequest,
    Staging,
    request_token,
)
from scheduler_components.kv_events.replay_messages import ReplayMeta, ReplayMetaKind, ReplayVerb
from scheduler_components.kv_events.stream_digest import initial_digest

OLD, NEW = b"o" * 16, b"n" * 16


def payload(seq: int) -> bytes:
    return b"%d" % seq


def at(epoch: bytes, count: int) -> Position:
    """Return the position after batches 0 to ``count - 1`` of an epoch."""
    position = Position(epoch, 0, initial_digest(epoch))
    for seq in range(count):
        position.advance(payload(seq))
    return position


def meta(cursor: StreamCursor, kind: ReplayMetaKind, position: Position, **changes: object) -> tuple[Instruction, ...]:
    """Answer the open request with a META of a publisher at ``position``, changed by ``changes``."""
    request_id = cursor.open_request_id
    assert request_id is not None
    fields: dict[str, object] = {
        "token": request_token(request_id), "epoch": position.epoch, "first": 0, "next": position.next, "kind": kind,
        "snap": False, "start": position.next, "chain": position.digest,
    }  # fmt: skip
    return cursor.on_replay_meta(request_id, ReplayMeta(**(fields | changes)))  # type: ignore[arg-type]


def receive_snapshot(cursor: StreamCursor, position: Position) -> tuple[Instruction, ...]:
    assert meta(cursor, ReplayMetaKind.BEGIN, position, snap=True) == (Staging.START,)
    assert cursor.on_replay_batch(cursor.open_request_id or 0, 0, b"chunk") == (
        ApplyStaged(position.next - 1, b"chunk", True),
    )
    assert meta(cursor, ReplayMetaKind.BEGIN, position, chunks=1) == ()
    return meta(cursor, ReplayMetaKind.END, position)


def live_cursor(count: int = 3) -> StreamCursor:
    """Return a cursor that is LIVE after ``count`` batches of the old epoch; request 1 was a snapshot."""
    cursor = StreamCursor(has_replay=True)
    assert cursor.on_connected() == (SendReplayRequest(1, 0, ReplayVerb.SYNC, NO_EPOCH),)
    assert (cursor.state, cursor.is_accepting_live, cursor.is_extended) == (StreamState.SYNCING, False, False)
    assert receive_snapshot(cursor, at(OLD, count)) == (Staging.COMMIT,)
    assert (cursor.state, cursor.last_seq, cursor.is_extended) == (StreamState.LIVE, count - 1, True)
    return cursor
