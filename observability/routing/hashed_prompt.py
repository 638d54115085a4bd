"""HashedPrompt: the hashes of a prompt's blocks, in each namespace that replicas have them in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scheduler_components.cache import PrefixNamespace, hash_pages

__all__ = ["HashedPrompt"]


@dataclass(slots=True, kw_only=True)
class HashedPrompt:
    """A prompt and the hashes of its whole blocks.

    Hashing takes most of the time of a pick for a long prompt. So a program with a lock around its router, or with an
    event loop, hashes a prompt before it routes it::

        with lock:
            namespaces = router.namespaces()
        prompt.hash_in(namespaces)  # without the lock; of a long prompt in a thread
        with lock:
            pick = router.route_prompt(prompt, now_s=clock())

    Attributes:
        token_ids: the prompt.
        page_size: tokens per block.
    """

    token_ids: Sequence[int]
    page_size: int
    _hashes: dict[PrefixNamespace, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False)

    def hash_in(self, namespaces: Iterable[PrefixNamespace]) -> None:
        """Hash the prompt in these namespaces, unless it is already.

        Raises:
            ConfigError: a token id does not fit u32.
        """
        for namespace in namespaces:
            if namespace not in self._hashes:
                self._hashes[namespace] = hash_pages(self.token_ids, self.page_size, namespace.seed())

    def hashes_in(self, namespace: PrefixNamespace) -> tuple[int, ...]:
        """Return the hashes in a namespace; none if the prompt was not hashed in it, so nothing counts as cached."""
        return self._hashes.get(namespace, ())
