"""How a check fails: with the trace of what was done to the part, what was expected of it, and what came."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol, TypeVar

from scheduler_components import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVCacheEvent, LoadSnapshot
from scheduler_components.cache import PrefixNamespace, hash_pages

__all__ = [
    "ConformanceError",
    "Trace",
    "CachedPrefix",
    "FollowerCore",
    "FollowingSubscriber",
    "ListeningPublisher",
    "MetricReader",
    "PrefixCache",
    "ServingScheduler",
    "BLOCK_SIZE",
    "ChainHistory",
]

T = TypeVar("T")

_MAX_SHOWN_CHARACTERS = 400


class ConformanceError(AssertionError):
    """A part does not do what its port promises: the part is to blame. An AssertionError, so that test runners agree.

    Args:
        title: the promise, as a sentence.
        steps: what was done to the part, in order; the last one is where it failed.
        expected: what the promise asks for.
        found: what came instead.
    """

    def __init__(self, title: str, steps: tuple[str, ...], expected: str, found: str) -> None:
        self.title = title
        self.steps = steps
        self.expected = expected
        self.found = found
        told = "".join(f"\n  {number}. {step}" for number, step in enumerate(steps, start=1))
        super().__init__(f"{title}{told}\n  expected: {expected}\n  found:    {found}")


class Trace:
    """What a check does to a part, told as it goes.

    Args:
        title: the promise that is checked, as a sentence.
    """

    __slots__ = ("_steps", "title")

    def __init__(self, title: str) -> None:
        self.title = title
        self._steps: list[str] = []

    def did(self, step: str) -> None:
        """Tell one step."""
        self._steps.append(step)

    def call(self, step: str, action: Callable[[], T]) -> T:
        """Tell a step and do it.

        Raises:
            ConformanceError: the part raised; the check asks for nothing that may.
        """
        self.did(step)
        try:
            return action()
        except ConformanceError:
            raise
        except Exception as error:
            raise self.failure("no error", f"{type(error).__name__}: {error}") from error

    def expect(self, expected: object, found: object, meaning: str = "") -> None:
        """Compare.

        Raises:
            ConformanceError: the two are not equal.
        """
        if expected != found:
            raise self.failure(f"{meaning}: {_shown(expected)}" if meaning else _shown(expected), _shown(found))

    def require(self, holds: bool, expected: str, found: object) -> None:
        """Raise unless ``holds``.

        Raises:
            ConformanceError: it does not.
        """
        if not holds:
            raise self.failure(expected, _shown(found))

    def expect_error(self, step: str, kind: type[Exception], action: Callable[[], object]) -> None:
        """Tell and do a step that the part must refuse.

        Raises:
            ConformanceError: it did not raise ``kind``.
        """
        self.did(step)
        try:
            answer = action()
        except kind:
            return
        except Exception as error:
            raise self.failure(kind.__name__, f"{type(error).__name__}: {error}") from error
        raise self.failure(kind.__name__, f"it returned {_shown(answer)}")

    def failure(self, expected: str, found: str) -> ConformanceError:
        """The trace so far as an error, to raise."""
        return ConformanceError(self.title, tuple(self._steps), expected, found)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."


# What the checks ask of the parts that they are run on, as ports. Read this first; wrap your part where it differs.


class CachedPrefix(Protocol):
    """What a cache says of a prompt: ``ports`` of the reference cache's ``PrefixMatch``."""

    @property
    def num_tokens(self) -> int:
        """Tokens covered, whole pages only."""
        ...

    @property
    def pages(self) -> Sequence[int]:
        """One page index for each whole page, in order."""
        ...

    @property
    def node(self) -> Any:
        """Whatever the cache wants back in ``lock`` and ``unlock``."""
        ...


class PrefixCache(Protocol):
    """A prefix cache over a pool of pages; what ``RadixCache`` promises. More members than a port of the kit: a check
    looks at the whole part, a component never does.
    """

    @property
    def page_size(self) -> int: ...

    @property
    def capacity_tokens(self) -> int: ...

    @property
    def used_tokens(self) -> int: ...

    @property
    def free_tokens(self) -> int: ...

    @property
    def evictable_tokens(self) -> int: ...

    def match_prefix(self, token_ids: Sequence[int], namespace: PrefixNamespace | None = None) -> CachedPrefix: ...

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], namespace: PrefixNamespace | None = None
    ) -> CachedPrefix: ...

    def lock(self, node: Any) -> None: ...

    def unlock(self, node: Any) -> None: ...

    def allocate(self, num_pages: int) -> Sequence[int]: ...

    def free(self, pages: Sequence[int]) -> None: ...

    def evict(self, num_pages: int) -> int: ...

    def clear(self) -> None: ...

    def take_events(self) -> Sequence[KVCacheEvent]: ...

    def block_hashes(self) -> Iterable[int]: ...

    def check_integrity(self) -> None: ...


class ListeningPublisher(Protocol):
    """A publisher of KV events on ZeroMQ, open: rank 0 of its engine, without a topic."""

    @property
    def endpoint(self) -> str:
        """The really bound PUB address."""
        ...

    @property
    def replay_endpoint(self) -> str | None:
        """The really bound ROUTER address."""
        ...

    def publish(self, events: EventBatch) -> None: ...

    def idle(self) -> None:
        """Called again and again while a check waits: a publisher without a thread works here."""
        ...

    def shutdown(self) -> None: ...


class FollowingSubscriber(Protocol):
    """A subscriber that follows one stream, open."""

    def poll(self, timeout_s: float) -> object:
        """Take in what has come, waiting up to ``timeout_s``."""
        ...

    def blocks(self) -> Set[int]:
        """Hashes on the device that it believes in."""
        ...

    def is_live(self) -> bool:
        """Whether it claims to know the publisher's whole state."""
        ...

    def close(self) -> None: ...


class FollowerCore(Protocol):
    """The core of a subscriber without sockets: messages and time in, requests and beliefs out."""

    def live(self, sequence: int, payload: bytes) -> None:
        """A live batch came."""
        ...

    def request(self) -> bytes | None:
        """The replay request that it wants sent now, each given once; a new one makes an older one void."""
        ...

    def answered(self, sequence: bytes, payload: bytes) -> None:
        """A message of the answer to its newest request came, the end marker included."""
        ...

    def advance(self, seconds: float) -> None:
        """Time passes: what is due is done."""
        ...

    def blocks(self) -> Set[int]:
        """Hashes on the device that it believes in."""
        ...

    def is_live(self) -> bool:
        """Whether it claims to know the publisher's state."""
        ...


class MetricReader(Protocol):
    """Whoever can say what a metrics sink exposes: a scrape, usually."""

    def value(self, metric: str, labels: Mapping[str, str]) -> float | None:
        """The newest value under a name of the catalogue, without prefix; None where there is none."""
        ...


class ServingScheduler(Protocol):
    """A scheduler that was given the check's event sink when it was opened."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> None: ...

    def step(self) -> object: ...

    def get_loads(self) -> LoadSnapshot: ...

    def block_hashes(self) -> Iterable[int]:
        """Every block that its cache holds on the device."""
        ...


# A simple history of events that breaks no rule: a chain of blocks that grows, is evicted from its end, and grows.

BLOCK_SIZE = 2


class ChainHistory:
    """Makes one event after the other, for checks that want real content without a cache.

    Attributes:
        standing: the hashes that whoever applied all events so far holds, root first.
    """

    def __init__(self) -> None:
        self.standing: list[int] = []
        self._tokens: list[int] = []

    def store(self, *tokens: int) -> BlockStored:
        """Append one block of ``BLOCK_SIZE`` tokens to the chain; the tokens default to the block's depth."""
        depth = len(self.standing)
        page = tokens or (depth, depth + 1)
        parent = self.standing[-1] if self.standing else None
        self._tokens += page
        self.standing.append(hash_pages(self._tokens, BLOCK_SIZE)[-1])
        return BlockStored((self.standing[-1],), parent, page, BLOCK_SIZE, None)

    def remove(self) -> BlockRemoved:
        """Remove the chain's last block."""
        del self._tokens[-BLOCK_SIZE:]
        return BlockRemoved((self.standing.pop(),))

    def clear(self) -> AllBlocksCleared:
        """Remove everything."""
        self.standing.clear()
        self._tokens.clear()
        return AllBlocksCleared()

    def next(self, number: int) -> KVCacheEvent:
        """Event ``number`` of a mixed run: mostly stores, every fifth a removal, every fortieth a clear."""
        if number % 40 == 39:
            return self.clear()
        if number % 5 == 4 and self.standing:
            return self.remove()
        return self.store()
