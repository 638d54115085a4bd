"""Page hashes and namespaces: one hash per page that covers its tokens and every token before it, equal on all ranks.

The hash chain is SGLang's (``get_hash_str`` and ``hash_str_to_int64``, 0.5.x): a page's digest is SHA-256 of the parent
page's 32-byte digest (empty at the root) and then each token as u32 little-endian. The block hash in events is the
first 8 bytes of the digest, big-endian and signed.

Tokens are passed "packed": as the u32 little-endian bytes that the chain hashes. Two prefixes then compare with one
memory comparison, and the key of a page is a slice.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256
from struct import iter_unpack, unpack

import msgspec

from scheduler_components.errors import ConfigError
from scheduler_components.events import DEFAULT_WEIGHT_VERSION

__all__ = [
    "DIGEST_BYTES",
    "TOKEN_BYTES",
    "block_hash_array",
    "block_hashes_of",
    "hash_pages",
    "pack_tokens",
    "page_digests",
    "split_digests",
    "unpack_tokens",
    "DEFAULT_NAMESPACE",
    "PrefixNamespace",
    "weight_key_of",
    "weight_namespace",
]

TOKEN_BYTES = 4
DIGEST_BYTES = 32


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return the token ids as u32 little-endian bytes. An ``array("I")`` is copied without a check of each id.

    Raises:
        ConfigError: a token id is not an integer from 0 to 2**32 - 1; the value names the first such id.
    """
    ids: Sequence[int] = token_ids
    if isinstance(token_ids, bytes | bytearray | memoryview):
        ids = list(token_ids)  # array() would read bytes as raw memory, not as a sequence of ids
    elif isinstance(token_ids, array) and token_ids.typecode == "I" and sys.byteorder == "little":
        return token_ids.tobytes()
    elif isinstance(token_ids, array) and token_ids.typecode != "I":
        ids = token_ids.tolist()  # SGLang's array("q"): array() reads a list faster than another array
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError) as error:
        raise ConfigError(
            "token_ids", _first_bad(token_ids), "is not a token id", "give integers below 2**32"
        ) from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _first_bad(token_ids: Sequence[int]) -> object:
    for token in token_ids:
        try:
            array("I", (token,))
        except (OverflowError, TypeError):
            return token
    return token_ids


def unpack_tokens(packed: bytes | bytearray) -> tuple[int, ...]:
    """Return the token ids that ``pack_tokens`` packed."""
    return unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)


def page_digests(packed: bytes | bytearray, page_size: int, prior: bytes) -> bytes:
    """Hash the whole pages of packed tokens. A partial last page is omitted.

    Args:
        packed: tokens as ``pack_tokens`` returns them.
        page_size: tokens per page.
        prior: digest of the page before the first one, or the namespace's seed at the root of a prefix.

    Returns:
        The concatenated 32-byte digests of the pages.
    """
    page_bytes = page_size * TOKEN_BYTES
    whole = memoryview(packed)[: len(packed) // page_bytes * page_bytes]
    pages = iter_unpack(f"{page_bytes}s", whole)
    return b"".join([prior := sha256(prior + page).digest() for (page,) in pages])


def block_hashes_of(digests: bytes | bytearray) -> tuple[int, ...]:
    """Return the signed 64-bit block hash of each 32-byte digest."""
    return tuple(block_hash_array(digests))


def split_digests(digests: bytes) -> list[bytes]:
    """Split concatenated digests into one per page."""
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def block_hash_array(digests: bytes | bytearray) -> array[int]:
    """Return the hashes of ``block_hashes_of`` as an ``array("q")``, without a loop over the pages."""
    hashes = array("q")
    hashes.frombytes(memoryview(digests).cast("q")[:: DIGEST_BYTES // 8].tobytes())
    if sys.byteorder == "little":
        hashes.byteswap()
    return hashes


def hash_pages(token_ids: Sequence[int], page_size: int, prior: bytes = b"") -> tuple[int, ...]:
    """Return the block hashes of a prefix's whole pages, in order.

    Args:
        token_ids: the tokens; a partial last page is omitted.
        page_size: tokens per page.
        prior: digest of the parent page, or ``PrefixNamespace.seed()`` for a prefix in a namespace.

    Raises:
        ConfigError: a token id does not fit u32, or the page size is below 1.
    """
    if page_size < 1:
        raise ConfigError("page_size", page_size, "is not a size", "give an integer of at least 1")
    return block_hashes_of(page_digests(pack_tokens(token_ids), page_size, prior))


class PrefixNamespace(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The properties besides its tokens that identify a prefix. Two namespaces never share a page or a hash.

    Attributes:
        lora_id, lora_name: the adapter that computed the pages; None for the base model.
        cache_salt: isolates tenants that send equal tokens.
        extra_key: any other property that the pages depend on (a multimodal digest, a model variant).
        session_id: the session that stored the pages. Events carry it; it is not part of the identity.
    """

    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    session_id: str | None = None

    def seed(self) -> bytes:
        """Return the input of the first page's hash: empty for the default namespace, whose hashes equal SGLang's.

        Otherwise it is SHA-256 of the msgpack array ``[lora_id, lora_name, cache_salt, extra_key]``, padded with zero
        bytes to one more than a multiple of four. A page hashes whole u32 tokens, which is a multiple of four bytes, so
        the input of a seed never equals that of a page.

        Raises:
            ConfigError: a part cannot be encoded: an integer beyond 64 bits, or text with lone surrogates.
        """
        identity = (self.lora_id, self.lora_name, self.cache_salt, self.extra_key)
        if identity == (None, None, None, None):
            return b""
        try:
            encoded = msgspec.msgpack.encode(identity)
        except (OverflowError, UnicodeEncodeError) as error:
            raise ConfigError(
                "namespace", identity, "cannot be encoded", "give 64-bit integers and valid text"
            ) from error
        return sha256(encoded + bytes((1 - len(encoded)) % TOKEN_BYTES)).digest()


DEFAULT_NAMESPACE = PrefixNamespace()
"""The base model without a salt or an extra key."""


_WEIGHT_KEY = "weight_version="


def weight_namespace(weight_version: str) -> PrefixNamespace:
    """Return the cache namespace of these weights: part of each block's hash, and published as its extra key.

    A block of other weights never matches, wherever it is stored, even for a reader that missed the clear.
    """
    if weight_version == DEFAULT_WEIGHT_VERSION:
        return DEFAULT_NAMESPACE
    return PrefixNamespace(extra_key=_WEIGHT_KEY + weight_version)


def weight_key_of(extra_keys: Sequence[Sequence[object] | None] | None) -> str | None:
    """Return the extra key of updated weights in the ``extra_keys`` of a stored block; None for the first weights.

    Extra keys of another kind, such as vLLM's hashes of images, are none.
    """
    first = extra_keys[0] if extra_keys else None
    key = first[0] if first else None
    return key if isinstance(key, str) and key.startswith(_WEIGHT_KEY) else None
