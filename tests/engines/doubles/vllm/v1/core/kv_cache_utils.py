"""Keys of the block pool: a block's hash and its KV-cache group."""

from __future__ import annotations


def make_block_hash_with_group_id(block_hash: bytes, group_id: int) -> bytes:
    return block_hash + group_id.to_bytes(4, "big")


def get_block_hash(key: bytes) -> bytes:
    return key[:-4]


def get_group_id(key: bytes) -> int:
    return int.from_bytes(key[-4:], "big")


def maybe_convert_block_hash(block_hash: bytes) -> int:
    return int.from_bytes(block_hash, "big") & (2**64 - 1)
