"""Events are immutable, and media and hashes have one meaning for all readers."""

from __future__ import annotations

import msgspec
import pytest
from kit.events import MEDIA

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from scheduler_components.cache import signed_block_hash
from scheduler_components.events import Tier, medium_tier
from scheduler_components.kv_events import BatchDecoder, BatchEncoder


def test_lists_given_to_an_event_cannot_change_it_later() -> None:
    token_ids, events = [1, 2], [AllBlocksCleared()]
    event = BlockStored(block_hashes=[1], parent_block_hash=None, token_ids=token_ids, block_size=2, lora_id=None)  # type: ignore[arg-type]
    batch = KVEventBatch(ts=1.0, events=events)  # type: ignore[arg-type]
    token_ids.append(3)
    events.clear()
    assert event.token_ids == (1, 2)
    assert batch.events == (AllBlocksCleared(),)


def test_plain_msgspec_writes_also_the_fields_that_the_encoder_omits() -> None:
    """As `docs/how-to/custom-publisher.md` says."""
    batch = KVEventBatch(1.0, (BlockRemoved((1,)),), 0)
    plain, encoded = msgspec.msgpack.encode(batch), BatchEncoder("array").encode(batch, rank=0)
    assert msgspec.msgpack.decode(plain)[1] == [["BlockRemoved", [1], None, None, None, None]]
    assert msgspec.msgpack.decode(encoded)[1] == [["BlockRemoved", [1]]]
    assert BatchDecoder().decode(plain).events == BatchDecoder().decode(encoded).events == batch.events


@pytest.mark.parametrize(("medium", "tier"), MEDIA.items())
def test_known_media_map_to_three_tiers(medium: str | None, tier: Tier | None) -> None:
    assert medium_tier(medium) is tier


@pytest.mark.parametrize(
    ("given", "signed"),
    [(5, 5), (-5, -5), (2**64 - 5, -5), (2**63, -(2**63)), (2**100 + 7, 7), (b"\x07", 7), (b"\1" + b"\xff" * 8, -1)],
)
def test_a_hash_is_folded_to_its_low_64_bits_as_readers_fold_it(given: int | bytes, signed: int) -> None:
    assert signed_block_hash(given) == signed
    if isinstance(given, bytes) or given < 2**64:
        peer = msgspec.msgpack.encode([1.0, [["BlockRemoved", [given]]], 0])
        assert BatchDecoder().decode(peer).events == (BlockRemoved((signed,)),)
