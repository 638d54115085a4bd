"""The errors of the kit: one tree.

Each error carries its facts as fields. Its class says which party is to blame: the user, the caller, a peer or the kit.
"""

from __future__ import annotations

from scheduler_components._internal.old_names import old_names

__all__ = [
    "CacheIntegrityError",
    "ComponentError",
    "ConfigError",
    "DecisionDivergenceError",
    "DecodeError",
    "ForkedPublisherError",
    "GrammarError",
    "LoadBackError",
    "LockstepError",
    "MissingExtraError",
    "OutOfPagesError",
    "PoolInvariantError",
    "PublisherClosedError",
    "PublisherNameTakenError",
    "QueueDivergenceError",
    "QueueFullError",
    "QuiesceDivergenceError",
    "SettingsDivergenceError",
    "StartError",
    "StorageError",
    "StorageStallError",
    "SyncClosedError",
    "SyncDivergenceError",
    "SyncTimeoutError",
    "TierDivergenceError",
    "first_line",
]

_MAX_SHOWN_CHARACTERS = 200
"""Length of a value in a message, which stays readable for a value of the size of a file. `value` keeps all of it."""


class ComponentError(Exception):
    """Root of all errors that the kit raises on purpose."""


class ConfigError(ComponentError, ValueError):
    """The user gave an invalid value. Raised before any socket, file or thread is opened.

    Args:
        field: name of the setting, as its owner writes it, for example ``"replay_endpoint"``.
        value: the given value.
        problem: what is wrong with it, as a clause.
        hint: what to give instead, as a clause.
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
    """The machine refused a configured resource: a port in use, a missing directory.

    Args:
        resource: the resource, for example ``"tcp://127.0.0.1:5557"``.
        problem: the answer of the system.
        hint: what the operator can do.
    """

    def __init__(self, resource: str, problem: str, hint: str) -> None:
        self.resource = resource
        self.problem = problem
        self.hint = hint
        super().__init__(f"{resource}: {problem}; {hint}")


class MissingExtraError(StartError, ModuleNotFoundError):
    """A library of an optional extra is not installed. Also a ModuleNotFoundError, as the import itself raises.

    Args:
        module: the missing module, for example ``"httpx"``; also in ``name``.
        extra: the extra of this package that installs it.
        otherwise: what else the user can do, as a clause; empty for nothing.
    """

    def __init__(self, module: str, extra: str, otherwise: str = "") -> None:
        self.extra = extra
        hint = f"pip install 'scheduler-components[{extra}]'"
        super().__init__(module, "is not installed", f"{hint}, or {otherwise}" if otherwise else hint)
        self.name = module


class PublisherClosedError(ComponentError, RuntimeError):
    """The caller called `publish()` on a publisher that is shut down."""


class PublisherNameTakenError(ComponentError, KeyError):
    """The caller registered a second publisher under the same name. A KeyError, as in SGLang's registry."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"publisher {name!r} is already registered")

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the message's repr


class ForkedPublisherError(ComponentError, RuntimeError):
    """A child process called `publish()` on its parent's publisher. The child must open its own."""

    def __init__(self, owner_pid: int) -> None:
        self.owner_pid = owner_pid
        super().__init__(f"this publisher belongs to process {owner_pid}; open another one after the fork")


class DecodeError(ComponentError):
    """A peer sent bytes that the wire format does not allow. Only this payload is lost."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class OutOfPagesError(ComponentError):
    """A page pool has fewer free pages than requested. Evict or retract first."""

    def __init__(self, wanted_pages: int, free_pages: int) -> None:
        self.wanted_pages = wanted_pages
        self.free_pages = free_pages
        super().__init__(f"{wanted_pages} pages wanted, {free_pages} free")


class CacheIntegrityError(ComponentError):
    """The counts of a cache do not add up: a bug in the kit, or in code that changed its tree."""


class PoolInvariantError(CacheIntegrityError):
    """Pages of a pool are lost, owned twice, or owned and free. Raised if the checker's policy says so.

    Args:
        step: the scheduler's step before the check.
        violations: one sentence each.
    """

    def __init__(self, step: int, violations: tuple[str, ...]) -> None:
        self.step = step
        self.violations = violations
        super().__init__(f"step {step}: {'; '.join(violations)}")


class LockstepError(ComponentError):
    """Ranks of one replica decided differently in the same step."""

    def __init__(self, step: int, rank: str, expected: str, found: str) -> None:
        self.step = step
        self.rank = rank
        self.expected = expected
        self.found = found
        super().__init__(f"step {step}: {rank} has state {found}, its leader has {expected}")


class DecisionDivergenceError(LockstepError):
    """Ranks of one replica decided differently, and their decision logs name the first such decision.

    Args:
        step: the last agreement before the decision.
        rank: this rank.
        decisions: rank -> its decision in words.
        sentence: the whole report.
    """

    def __init__(self, step: int, rank: int, decisions: dict[int, str], sentence: str) -> None:
        ComponentError.__init__(self, sentence)
        self.step = step
        self.rank = f"rank {rank}"
        self.decisions = decisions
        self.expected = decisions.get(min(decisions, default=rank), "unknown")
        self.found = decisions.get(rank, "unknown")


class SyncTimeoutError(ComponentError, TimeoutError):
    """Not all ranks made a collective call in time.

    Some ranks or the network to them failed, or the ranks are alive and do not make this call, because this rank makes
    one call too many.

    Args:
        operation: name of the call.
        step: the caller's step.
        missing_ranks: ranks that did not answer a later inquiry; empty if all answered late.
        waited_s: the timeout, in seconds.
        cause: error of the transport; empty if it reported none.
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
        if missing_ranks:
            missing += " (they failed, hang, or do not make this call)"
        detail = f" ({cause})" if cause else ""
        super().__init__(
            f"{operation!r} at step {step}: not agreed within {waited_s:g} s; missing ranks: {missing}{detail}"
        )


class SyncDivergenceError(ComponentError):
    """Ranks made different collective calls: a condition of one rank decides whether a call happens.

    Args:
        call: number of the call, counted from 0, at which they differ.
        places: rank -> its call.
    """

    def __init__(self, call: int, places: dict[int, str]) -> None:
        self.call = call
        self.places = places
        listed = "; ".join(f"rank {rank}: {place}" for rank, place in sorted(places.items()))
        super().__init__(f"ranks diverge at agreement {call}: {listed}")


class SyncClosedError(ComponentError, RuntimeError):
    """The caller used parallel groups that are closed."""


class SettingsDivergenceError(ComponentError):
    """Ranks of one replica were started with different settings, so they would decide differently.

    Args:
        operation: what the settings are for.
        settings: field -> rank -> its value in words; only the fields that differ.
    """

    def __init__(self, operation: str, settings: dict[str, dict[int, str]]) -> None:
        self.operation = operation
        self.settings = settings
        listed = "; ".join(
            f"{field}: " + ", ".join(f"rank {rank} has {value}" for rank, value in sorted(values.items()))
            for field, values in settings.items()
        )
        super().__init__(f"{operation}: ranks have different settings: {listed}; give all ranks the same settings")


class TierDivergenceError(ComponentError):
    """Ranks of one replica hold different pages on a tier, so their later decisions would contradict each other.

    Args:
        step: the agreement that found it; the ranks diverged in the step before.
        digest: digest of this rank's pages. Compare it with the other ranks'.
    """

    def __init__(self, step: int, digest: int) -> None:
        self.step = step
        self.digest = digest
        super().__init__(f"step {step}: ranks hold different pages on their tiers; this rank's digest is {digest:016x}")


class QuiesceDivergenceError(ComponentError):
    """Ranks of one replica are in different states: one would compute while another is quiesced.

    Args:
        step: the agreement that found it, counted from 1.
        operation: the pending control request.
        state: this rank's state, in words.
    """

    def __init__(self, step: int, operation: str, state: str) -> None:
        self.step = step
        self.operation = operation
        self.state = state
        super().__init__(f"agreement {step}, {operation!r}: ranks are in different states; this rank is {state}")


class QueueDivergenceError(ComponentError):
    """The same queue holds other requests on another rank, because one rank missed an addition, an end or a departure.

    Args:
        step: the agreement that found it; the ranks diverged after the one before.
        queue: name of the queue.
        digest: digest of this rank's additions, ends and departures. Compare it with the other ranks'.
    """

    def __init__(self, step: int, queue: str, digest: int) -> None:
        self.step = step
        self.queue = queue
        self.digest = digest
        super().__init__(
            f"step {step}: ranks hold different requests in queue {queue!r}; this rank's digest is {digest:08x}"
        )


class QueueFullError(ComponentError):
    """A queue has as many waiting requests as it may hold. The client may send its request again later.

    Args:
        queue: name of the queue.
        num_waiting: requests that wait in it.
    """

    def __init__(self, queue: str, num_waiting: int) -> None:
        self.queue = queue
        self.num_waiting = num_waiting
        super().__init__(f"queue {queue!r} holds {num_waiting} requests, which is its limit; try again later")


class StorageError(ComponentError):
    """A page store failed. The cache treats it as a miss and continues.

    Args:
        backend: name of the store, for example ``"file"``.
        operation: method of the port, for example ``"batch_get"``.
        problem: the answer of the store.
    """

    def __init__(self, backend: str, operation: str, problem: str) -> None:
        self.backend = backend
        self.operation = operation
        self.problem = problem
        super().__init__(f"{backend} {operation}: {problem}")


class StorageStallError(StorageError):
    """A page store did not answer before its deadline."""


class GrammarError(ComponentError):
    """A grammar cannot be compiled, or an output does not match it. The text says why, in one sentence."""


class LoadBackError(ComponentError):
    """Pages that a forward reads were not loaded to the device, so its requests cannot be served.

    Args:
        op: number of the load.
        problem: why it failed.
    """

    def __init__(self, op: int, problem: str) -> None:
        self.op = op
        self.problem = problem
        super().__init__(f"load {op}: {problem}")


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error without its last punctuation, to quote it in a sentence.

    An error without text is quoted by the name of its type.
    """
    return (str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(".:;")


__getattr__ = old_names(__name__)
