"""What else than its tokens decides whether two prefixes may share pages."""

from __future__ import annotations

from hashlib import sha256

import msgspec

from scheduler_components.cache.block_hash import TOKEN_BYTES
from scheduler_components.errors import ConfigError

__all__ = ["PLAIN_NAMESPACE", "PrefixNamespace"]


class PrefixNamespace(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The identity of a prefix beside its tokens. Prefixes of different namespaces never share a page or a hash.

    Attributes:
        lora_id, lora_name: the adapter that computed the pages; None for the base model.
        cache_salt: isolates tenants that send the same tokens.
        extra_key: whatever else the pages depend on (a multimodal digest, a model variant).
        session_id: who stored the pages; told in events, no part of the identity.
    """

    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    session_id: str | None = None

    def seed(self) -> bytes:
        """Return what the hash chain starts from: empty for the plain namespace, so that its hashes are SGLang's.

        Otherwise SHA-256 over the msgpack array ``[lora_id, lora_name, cache_salt, extra_key]``, padded with zero
        bytes to one more than a multiple of four. Pages hash whole u32 tokens, a multiple of four, so a seed's
        input can never be a page's.

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


PLAIN_NAMESPACE = PrefixNamespace()
"""The base model, nothing set apart."""
