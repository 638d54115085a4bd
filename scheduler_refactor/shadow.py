"""Shadow: run a new component next to the old one in production, compare the two, and switch between them.

Both sides get the same calls. One side *leads*: its calls reach the world, and its results are used. The other side
*follows*: it reaches the world through echoes, which answer from what the leader has just received and compare what the
follower sends with what the leader has sent. So the follower has no effect outside of itself, and it sees the same
time, the same queues and the same events as the leader.

Because the follower has seen every call, its state is that of the leader, and `Shadow.lead` can change sides between
two calls: to the new side, and back to the old one.

Two functions wire a component. `port` (or `tee` for a function) makes a pair of collaborators, one for each side: what
is below the components. `component` (or `pair`) makes the one that the scheduler calls: what is above them::

    shadow = Shadow("load")
    old_clock, new_clock = shadow.tee("clock", clock, exact=False)
    self.load = shadow.component(
        old=Load(queues=self, clock=old_clock),
        new=LoadInquirer(queues=self, clock=new_clock),
        calls=("get_loads",),
    )

A failure or a difference of the follower never reaches the step. It is counted, and logged once per episode. An error
of the leader is the leader's behaviour, and it is raised as it would be without a shadow.

Limits. A shadow belongs to one thread. A method that changes its arguments needs `arguments`, which copies them for the
follower. An object that both sides would write must exist twice, one per side. What the leader passes to a port must
not change during the call; `encode` turns it into bytes where it does. A component that uses another shadowed component
gets it through a `port`. An endless follower makes an endless step.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Literal, ParamSpec, TypeAlias, TypeVar, cast

import msgspec

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components.errors import ComponentError, ConfigError

logger = logging.getLogger(__name__)

Side: TypeAlias = Literal["old", "new"]
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_Arguments: TypeAlias = tuple[tuple[object, ...], dict[str, object]]
_SIDES: tuple[Side, Side] = ("old", "new")
_MAX_SHOWN_CHARACTERS = 200


class _DifferenceError(ComponentError):
    """The follower did something else than the leader."""


class ShadowStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a shadow.

    Attributes:
        calls: calls that both sides received.
        differences: calls in which the follower sent, returned or raised something else.
        failures: calls in which the follower raised and the leader did not.
        leader: the side whose results are used.
        following: whether the other side still receives the calls.
    """

    calls: int
    differences: int
    failures: int
    leader: Side
    following: bool


class _Outcome(msgspec.Struct):
    """The result of a call, or its exception."""

    result: object = None
    error: Exception | None = None

    def __str__(self) -> str:
        return f"returns {_shown(self.result)}" if self.error is None else f"raises {_shown(self.error)}"


class _Call(msgspec.Struct):
    """A call of the leader to a collaborator: what was sent, as values or bytes, and the outcome."""

    name: str
    sent: object
    result: object = None
    error: Exception | None = None


class _Tape:
    """What the leader received and sent during one call, and how far the follower is in it."""

    __slots__ = ("difference", "exact", "inexact", "is_following", "position", "positions")

    def __init__(self) -> None:
        self.difference: _DifferenceError | None = None
        self.exact: list[_Call] = []
        self.inexact: dict[str, list[_Call]] = {}
        self.is_following = False
        self.position = 0
        self.positions: dict[str, int] = {}


class Shadow:
    """Calls an old and a new component with the same arguments, and compares them.

    Args:
        name: of the component, for logs.
        leader: the side whose results are used at first.

    Attributes:
        failures: counts and logs failures and differences by method.
    """

    def __init__(self, name: str, *, leader: Side = "old") -> None:
        self.name = name
        self.failures = FailureLog(logger)
        self._leader: Side = _checked(leader)
        self._following = True
        self._tape: _Tape | None = None
        self._num_calls = 0
        self._num_differences = 0
        self._num_failures = 0

    def stats(self) -> ShadowStats:
        """Return the counters."""
        return ShadowStats(
            calls=self._num_calls,
            differences=self._num_differences,
            failures=self._num_failures,
            leader=self._leader,
            following=self._following,
        )

    def lead(self, side: Side) -> None:
        """Use the results of this side from the next call on. Call it between two steps.

        Raises:
            ConfigError: the side is unknown, a call is running, or the side no longer follows.
        """
        _checked(side)
        if side == self._leader:
            return
        if self._tape is not None:
            raise ConfigError("leader", side, "changes inside a call", "change it between two steps")
        if not self._following:
            raise ConfigError("leader", side, "has missed calls since stop()", "start the process again")
        logger.warning(
            "shadow %s: the %s side leads now; %d differences until now", self.name, side, self._num_differences
        )
        self._leader = side

    def stop(self) -> None:
        """Stop calling the follower for good. A shadow that is stopped costs one test per call."""
        self._following = False

    # Above the components.

    def pair(
        self,
        name: str,
        old: Callable[P, R],
        new: Callable[P, R],
        *,
        arguments: Callable[..., _Arguments] | None = None,
        same: Callable[[R, R], bool] | None = None,
    ) -> Callable[P, R]:
        """Return one function for both sides.

        Args:
            name: of the method, for logs.
            old: the old side's.
            new: the new side's.
            arguments: called with the arguments before the leader is. It returns those of the follower: a tuple and a
                dict. Default: the same objects, so use it for a method that changes its arguments.
            same: whether two results are equal. Default: ``==``.
        """
        activity = f"the shadow of {self.name}.{name}"

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            leading, following = (old, new) if self._leader == "old" else (new, old)
            if not self._following:
                return leading(*args, **kwargs)
            outer = self._tape
            if outer is not None and outer.is_following:
                outer.difference = _DifferenceError(f"the follower calls {name} of the shadow; give it a port")
                raise outer.difference
            copied = (args, kwargs) if arguments is None else self._copied(activity, arguments, args, kwargs)
            self._tape = _Tape()
            try:
                result = leading(*args, **kwargs)
                self._follow(activity, following, copied, _Outcome(result), same)
            except Exception as error:
                trace, context = error.__traceback__, error.__context__
                self._follow(activity, following, copied, _Outcome(error=error), same)
                error.__traceback__, error.__context__ = trace, context  # the follower may have raised it again
                raise
            finally:
                self._tape = outer
            return result

        return call

    def component(self, old: T, new: object, *, calls: Sequence[str]) -> T:
        """Return a stand-in for both components. It has the `calls` of both, and otherwise the leader's attributes.

        Raises:
            ConfigError: a component has no such method.
        """
        return cast("T", _Component(self, old, new, calls))

    # Below the components.

    def tee(
        self,
        name: str,
        real: Callable[P, R],
        *,
        exact: bool = True,
        encode: Callable[..., bytes] | None = None,
    ) -> tuple[Callable[P, R], Callable[P, R]]:
        """Return a collaborator for the old side and one for the new side.

        Args:
            name: of the function, for logs.
            real: the function that the leader reaches.
            exact: whether the follower must make the same calls in the same order, as for a sink or a destructive
                read. Otherwise its calls get the leader's results in turn and then the last one again, as for a clock,
                and a call that the leader never made reaches the real function.
            encode: called with the arguments of an exact call; its bytes are compared. Default: the arguments are
                compared by ``==``, when the follower makes its call.
        """
        old, new = (self._side_of_tee(side, name, real, exact, encode) for side in _SIDES)
        return old, new

    def port(self, name: str, real: T, *, calls: Sequence[str], inexact: Sequence[str] = ()) -> tuple[T, T]:
        """Return an object for each side: its `calls` and `inexact` methods are teed, all other attributes are live.

        Args:
            name: of the port, for logs.
            real: the object that the leader reaches. A live attribute must be a read without an effect.
            calls: methods with an effect, for example ``publish`` and ``take_events``.
            inexact: methods that a side may call more or less often.

        Raises:
            ConfigError: the object has no such method.
        """
        sides: tuple[dict[str, Callable[..., object]], dict[str, Callable[..., object]]] = ({}, {})

        def assign(attribute: str, value: object) -> None:
            setattr(real, attribute, value)

        methods: dict[str, Callable[..., object]] = {"__setattr__": assign}
        methods |= {method: _method(real, method) for method in (*calls, *inexact)}
        for method, function in methods.items():
            teed = self.tee(f"{name}.{method}", function, exact=method not in inexact)
            for side, one in zip(sides, teed, strict=True):
                side[method] = one
        old, new = (cast("T", _Port(real, teed)) for teed in sides)
        return old, new

    # Inside.

    def _copied(
        self,
        activity: str,
        arguments: Callable[..., _Arguments],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> _Arguments | None:
        """Return the follower's arguments; None if they cannot be copied, and then it misses the call."""
        try:
            return arguments(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the step must go on
            self._num_failures += 1
            self.failures.failed(activity, error)
            return None

    def _follow(
        self,
        activity: str,
        following: Callable[..., R],
        arguments: _Arguments | None,
        expected: _Outcome,
        same: Callable[[R, R], bool] | None,
    ) -> None:
        """Call the follower, compare it with the leader, and count what differs. Never raise an Exception."""
        self._num_calls += 1
        tape = self._tape
        if arguments is None or tape is None:
            return
        tape.is_following = True
        try:
            found = _outcome(following, arguments)
            if tape.difference is not None:  # also if the follower has handled it
                raise tape.difference
            if found.error is not None and expected.error is None:
                raise found.error
            if tape.position < len(tape.exact):
                raise _DifferenceError(f"the follower does not call {tape.exact[tape.position].name}")
            _compare(expected, found, cast("Callable[[object, object], bool] | None", same))
        except _DifferenceError as error:
            self._num_differences += 1
            self.failures.failed(activity, error)
        except Exception as error:  # noqa: BLE001 - the step must go on
            self._num_failures += 1
            self.failures.failed(activity, error)
        else:
            self.failures.succeeded(activity)

    def _side_of_tee(
        self, side: Side, name: str, real: Callable[P, R], exact: bool, encode: Callable[..., bytes] | None
    ) -> Callable[P, R]:
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            tape = self._tape
            if side == self._leader:
                if tape is None:
                    return real(*args, **kwargs)
                made = _Call(name, (args, kwargs) if encode is None else _encoded(encode, args, kwargs))
                (tape.exact if exact else tape.inexact.setdefault(name, [])).append(made)
                try:
                    made.result = result = real(*args, **kwargs)
                except Exception as error:
                    made.error = error
                    raise
                return result
            if tape is None or not tape.is_following:
                if exact:
                    raise _DifferenceError(f"the follower calls {name} outside of a compared call")
                return real(*args, **kwargs)
            if exact:
                sent = (args, kwargs) if encode is None else _encoded(encode, args, kwargs)
                made = _next_exact(tape, name, sent)
            elif name in tape.inexact:
                made = _next_inexact(tape, name)
            else:
                return real(*args, **kwargs)
            if made.error is not None:
                raise made.error
            return cast("R", made.result)

        return call


class _Component:
    """What the scheduler calls in place of the old and the new component."""

    _shadow: Shadow
    _sides: dict[Side, object]

    def __init__(self, shadow: Shadow, old: object, new: object, calls: Sequence[str]) -> None:
        own = vars(self)
        own["_shadow"], own["_sides"] = shadow, {"old": old, "new": new}
        for name in calls:
            own[name] = shadow.pair(name, _method(old, name), _method(new, name))

    def __getattr__(self, name: str) -> object:
        return getattr(self._sides[self._shadow._leader], name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name!r} cannot be set on a shadowed component; set it on both components")


class _Port:
    """One side's view of a collaborator."""

    _real: object
    _assign: Callable[[str, object], object]

    def __init__(self, real: object, teed: dict[str, Callable[..., object]]) -> None:
        own = vars(self)
        own["_real"], own["_assign"] = real, teed["__setattr__"]
        own.update((name, function) for name, function in teed.items() if name != "__setattr__")

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._assign(name, value)


def _next_inexact(tape: _Tape, name: str) -> _Call:
    """Return the leader's next call of this name, or its last one again."""
    made = tape.inexact[name]
    position = tape.positions.get(name, 0)
    tape.positions[name] = position + 1
    return made[min(position, len(made) - 1)]


def _next_exact(tape: _Tape, name: str, sent: object) -> _Call:
    """Return the leader's next call, which the follower must make, too.

    Raises:
        _DifferenceError: the leader made another call, or none. The tape keeps it, because the follower may handle it.
    """
    if tape.difference is not None:
        raise tape.difference
    expected = tape.exact[tape.position] if tape.position < len(tape.exact) else None
    if expected is not None and expected.name == name and expected.sent == sent:
        tape.position += 1
        return expected
    if expected is None or expected.name != name:
        instead = f"the leader calls {expected.name}" if expected else "the leader makes no further call"
        problem = f"the follower calls {name}, {instead}"
    else:
        problem = f"the leader calls {name}{_shown_sent(expected.sent)}, the follower {name}{_shown_sent(sent)}"
    tape.difference = _DifferenceError(problem)
    raise tape.difference


def _encoded(encode: Callable[..., bytes], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    try:
        return encode(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the step must go on; an error equals no other one, so it is a difference
        return error


def _outcome(function: Callable[..., object], arguments: _Arguments) -> _Outcome:
    args, kwargs = arguments
    try:
        return _Outcome(function(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - an exception is an outcome
        return _Outcome(error=error)


def _compare(expected: _Outcome, found: _Outcome, same: Callable[[object, object], bool] | None) -> None:
    """Raise a difference of two outcomes.

    Raises:
        _DifferenceError: the outcomes differ.
    """
    if expected.error is not None:
        if type(expected.error) is not type(found.error) or str(expected.error) != str(found.error):
            raise _DifferenceError(f"the leader {expected}, the follower {found}")
    elif not (same or operator.eq)(expected.result, found.result):
        raise _DifferenceError(f"the leader {expected}, the follower {found}")


def _shown_sent(sent: object) -> str:
    """Return what a call sent, as it is written in code; bytes and errors of an encoder as they are."""
    if not isinstance(sent, tuple):
        return f" with {_shown(sent)}"
    args, kwargs = cast("_Arguments", sent)
    return f"({', '.join([*map(_shown, args), *(f'{name}={_shown(value)}' for name, value in kwargs.items())])})"


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _MAX_SHOWN_CHARACTERS else f"{shown[:_MAX_SHOWN_CHARACTERS]}..."


def _method(owner: object, name: str) -> Callable[..., object]:
    method = getattr(owner, name, None)
    if not callable(method):
        kind = type(owner).__name__
        raise ConfigError("calls", name, f"is no method of {kind}", f"name methods of {kind}")
    return cast("Callable[..., object]", method)


def _checked(side: Side) -> Side:
    if side not in _SIDES:
        raise ConfigError("leader", side, "is no side", 'give "old" or "new"')
    return side
