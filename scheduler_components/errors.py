"""The errors of the kit: one tree.

Each error carries its facts as fields and says who is to blame.
"""

from __future__ import annotations

__all__ = [
    "CacheIntegrityError",
    "ComponentError",
    "ConfigError",
    "DecodeError",
    "ForkedPublisherError",
    "LockstepError",
    "OutOfPagesError",
    "LoadBackError",
    "PoolInvariantError",
    "PublisherClosedError",
    "PublisherNameTakenError",
    "QuiesceDivergenceError",
    "SettingsDivergenceError",
    "StartError",
    "StorageError",
    "StorageStallError",
    "SyncClosedError",
    "SyncDivergenceError",
    "SyncTimeoutError",
    "TierDivergenceError",
]

_MAX_SHOWN_CHARACTERS = 200
"""A message stays readable when a whole file was given for a value; the field ``value`` keeps all of it."""


class ComponentError(Exception):
    """Root of every error that this kit raises on purpose."""


class ConfigError(ComponentError, ValueError):
    """A person gave a value that cannot work. Raised before any socket, file or thread is opened.

    Args:
        field: the name of the setting as its owner writes it, for example ``"replay_endpoint"``.
        value: the value that was given.
        problem: what is wrong with it, as a clause.
        hint: what to write instead, as a clause.
    """

    def __init__(self, field: str, value: object, problem: str, hint: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        self.hint = hint
        shown = repr(value)
        if len(shown) > _MAX_SHOWN_CHARACTERS:
            shown = f"{shown[:_MAX_SHOWN_CHARACTERS]}..."
        super().__init__(f"{field}={shown}: {problem}; {hint}")


class StartError(ComponentError):
    """The machine refused a resource that the configuration asked for (a port in use, a missing directory).

    Args:
        resource: what was asked for, for example ``"tcp://127.0.0.1:5557"``.
        problem: what the system answered.
        hint: what the operator can do.
    """

    def __init__(self, resource: str, problem: str, hint: str) -> None:
        self.resource = resource
        self.problem = problem
        self.hint = hint
        super().__init__(f"{resource}: {problem}; {hint}")


class PublisherClosedError(ComponentError, RuntimeError):
    """``publish()`` was called on a publisher that has been shut down: the caller is to blame."""


class PublisherNameTakenError(ComponentError, KeyError):
    """A second publisher was registered under one name: the caller is to blame. KeyError as in SGLang's registry."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"publisher {name!r} is already registered")

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the message's repr


class ForkedPublisherError(ComponentError, RuntimeError):
    """``publish()`` was called in a child process of the publisher's: open one of its own there."""

    def __init__(self, owner_pid: int) -> None:
        self.owner_pid = owner_pid
        super().__init__(f"this publisher belongs to process {owner_pid}; open one of your own after the fork")


class DecodeError(ComponentError):
    """Bytes from a peer that are not what the wire allows: the peer is to blame, its payload alone is lost."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class OutOfPagesError(ComponentError):
    """A page pool was asked for more pages than are free: evict or retract first."""

    def __init__(self, wanted_pages: int, free_pages: int) -> None:
        self.wanted_pages = wanted_pages
        self.free_pages = free_pages
        super().__init__(f"{wanted_pages} pages wanted, {free_pages} free")


class CacheIntegrityError(ComponentError):
    """A cache's own arithmetic does not add up: the kit, or who mutated its tree, is to blame."""


class PoolInvariantError(CacheIntegrityError):
    """Pages of a pool are lost, owned twice, or both owned and free; raised where the policy of the checker says so.

    Args:
        step: the scheduler's, in which it was found.
        problems: one sentence each.
    """

    def __init__(self, step: int, problems: tuple[str, ...]) -> None:
        self.step = step
        self.problems = problems
        super().__init__(f"step {step}: {'; '.join(problems)}")


class LockstepError(ComponentError):
    """Ranks of one replica decided differently in the same step."""

    def __init__(self, step: int, rank: str, expected: str, found: str) -> None:
        self.step = step
        self.rank = rank
        self.expected = expected
        self.found = found
        super().__init__(f"step {step}: {rank} has state {found}, its leader has {expected}")


class SyncTimeoutError(ComponentError, TimeoutError):
    """An agreement did not come about in its time: the missing ranks, or the way to them, are to blame.

    Args:
        operation: the agreement that was waited for.
        step: the caller's step.
        missing_ranks: ranks that did not answer when they were called after it; empty when all answered late.
        waited_s: the bound that was passed, seconds.
        cause: what the transport answered; empty where it said nothing.
    """

    def __init__(
        self, operation: str, step: int, missing_ranks: tuple[int, ...], waited_s: float, cause: str = ""
    ) -> None:
        self.operation = operation
        self.step = step
        self.missing_ranks = missing_ranks
        self.waited_s = waited_s
        self.cause = cause
        missing = ", ".join(map(str, missing_ranks)) or "none, all answered late"
        detail = f" ({cause})" if cause else ""
        super().__init__(
            f"{operation!r} at step {step}: not agreed within {waited_s:g} s; missing ranks: {missing}{detail}"
        )


class SyncDivergenceError(ComponentError):
    """Ranks of one agreement came with different questions: a rank-local condition stands before a collective.

    Args:
        call: number of the agreement, counted from 0, where they part.
        places: rank -> what that rank asked there.
    """

    def __init__(self, call: int, places: dict[int, str]) -> None:
        self.call = call
        self.places = places
        listed = "; ".join(f"rank {rank}: {place}" for rank, place in sorted(places.items()))
        super().__init__(f"ranks part at agreement {call}: {listed}")


class SyncClosedError(ComponentError, RuntimeError):
    """An agreement was asked of a domain that has been closed: the caller is to blame."""


class SettingsDivergenceError(ComponentError):
    """Ranks of one replica were started with different settings: they would decide differently sooner or later.

    Args:
        operation: what the settings are for.
        settings: field -> rank -> the value there, in words; only the fields that differ.
    """

    def __init__(self, operation: str, settings: dict[str, dict[int, str]]) -> None:
        self.operation = operation
        self.settings = settings
        listed = "; ".join(
            f"{field}: " + ", ".join(f"rank {rank} has {value}" for rank, value in sorted(values.items()))
            for field, values in settings.items()
        )
        super().__init__(f"{operation}: ranks have different settings: {listed}. Give all of them the same")


class TierDivergenceError(ComponentError):
    """Ranks of one replica hold different pages on a tier: what they decide from here on would not fit together.

    Args:
        step: the agreement that found it; the ranks parted in the step before.
        digest: what this rank holds, as one number; compare it with the other ranks'.
    """

    def __init__(self, step: int, digest: int) -> None:
        self.step = step
        self.digest = digest
        super().__init__(f"step {step}: ranks hold different pages on their tiers; this rank's digest is {digest:016x}")


class QuiesceDivergenceError(ComponentError):
    """Ranks of one replica were brought to different states: one would compute where another rests.

    Args:
        step: the question that found it, counted from 1.
        operation: the order that stood.
        state: this rank's, in words.
    """

    def __init__(self, step: int, operation: str, state: str) -> None:
        self.step = step
        self.operation = operation
        self.state = state
        super().__init__(f"question {step}, {operation!r}: ranks are in different states; this rank is {state}")


class StorageError(ComponentError):
    """A page store could not do what it was asked: a miss, never a reason to stop.

    Args:
        backend: the store's name, for example ``"file"``.
        operation: the port's method, for example ``"batch_get"``.
        problem: what the store answered.
    """

    def __init__(self, backend: str, operation: str, problem: str) -> None:
        self.backend = backend
        self.operation = operation
        self.problem = problem
        super().__init__(f"{backend} {operation}: {problem}")


class StorageStallError(StorageError):
    """A page store did not answer within its deadline."""


class LoadBackError(ComponentError):
    """Pages that a forward was to read have not come to the device: the forward's requests cannot be served.

    Args:
        op: number of the load.
        problem: what became of it.
    """

    def __init__(self, op: int, problem: str) -> None:
        self.op = op
        self.problem = problem
        super().__init__(f"load {op}: {problem}")
