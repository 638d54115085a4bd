"""The backstop: a thread that drains the publisher where the scheduler does not.

A scheduler that calls ``idle()`` encodes, sends and serves replays there. One that does not leaves it to this thread,
for as long as it lets the thread have the GIL; the thread says how late it came. The backstop sleeps until it is woken:
by the first batch of a busy period that waits, or by the replay socket. Then it looks every few milliseconds whether
there is something to do, and goes back to sleep when nothing is left to watch.

At first it dozes, for a quarter of a second: it waits for a lock, which costs the scheduler a third of what a byte in a
pipe does (8 us against 25 where caches are cold, and a step of an engine leaves them so). A replay client waits for the
end of its nap then. When nothing has come for longer it sleeps on its descriptors, without any wake-up of its own;
while a replay client is stuck, with one now and then.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import math
import os
import select
import threading
import time
import weakref
from typing import Protocol

__all__ = ["Backstop", "Drainable", "DrainResult"]

_log = logging.getLogger(__name__)

_LOOK_EVERY_MS = 8.0
"""Twice as often would halve how long a last batch waits, and cost every step of a busy scheduler some microseconds."""

_BREATHER_S = 0.0001
"""Between two slices of work: whoever waits for the GIL gets it, which a short release inside a send does not grant."""

_LOOKS_BEFORE_SLEEP = 60

_LOOK_AT_STUCK_MS = 500.0
"""A stuck client that takes again wakes the thread by its descriptor, as a rule."""

_NAPS_S = (0.008, 0.016, *(0.032,) * 7)
"""Between two steps that publish, an engine decodes for some milliseconds; each nap takes the GIL once."""

# ``os.write`` lets go of the GIL: the thread takes it at once and keeps it for a slice of work, and the scheduler waits
# for it inside ``publish()`` (380 us at the median inside vLLM, 80 without). One byte for a pipe blocks nobody.
_write_with_gil = ctypes.PyDLL(None).write
_write_with_gil.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write_with_gil.restype = ctypes.c_ssize_t


class DrainResult(enum.Enum):
    """What a look found."""

    DRAINING = "the scheduler drains by itself: look again in a while, and leave the sockets to it"
    BUSY = "drained, and there is more to do at once"
    SHARING = "drained a slice, and there is more to do once the scheduler has had the GIL"
    HANDED_OVER = "drained, and the scheduler will hand over more: look again when ``soon_s`` has passed"
    WAITING = "drained, and something is to be done when time has passed"
    LULL = "drained, and the scheduler hands nothing over any more"
    STUCK = "drained, and a replay client has taken nothing for a while: look again now and then"
    QUIET = "drained, and nothing is left"


class Drainable(Protocol):
    """What the backstop drains."""

    def drain_for_scheduler(self, late_s: float) -> DrainResult:
        """Drain what was handed over, or if the scheduler has not drained lately.

        ``late_s`` is how long after its time the look comes: the GIL was not free, or the machine is busy.
        """
        ...

    def stop_deferring(self) -> None:
        """Nobody looks from now on: leave nothing to the backstop without waking it."""
        ...


class Backstop:
    """Owns one daemon thread, a bell and a wake-up pipe; ``start`` makes them, ``stop`` ends them.

    Args:
        drained: asked on every look. It is not kept alive: a publisher that nobody else holds is closed by its
            finalizer, which may run on this thread.
        watched_fds: file descriptors that become readable when a peer wants something.
        name: the thread's name.

    Attributes:
        has_ended: True once the thread is gone, stopped or dead; a caller must not count on it any more.
        soon_s: time until the next look after ``DrainResult.HANDED_OVER``; who is drained says it.
    """

    __slots__ = (
        "_bell",
        "_drained",
        "_due_s",
        "_ends_itself",
        "_inherited",
        "_is_fast_asleep",
        "_looking",
        "_name",
        "_pipe",
        "_stopping",
        "_thread",
        "_watched_fds",
        "has_ended",
        "soon_s",
    )

    def __init__(self, drained: Drainable, *, watched_fds: tuple[int, ...], name: str) -> None:
        self._drained = weakref.ref(drained)
        self._watched_fds = watched_fds
        self._name = name
        self.has_ended = False
        self._bell = threading.Lock()  # let go of to wake it from a nap
        self._bell.acquire()
        self._is_fast_asleep = False
        self._looking = False
        self._due_s = math.inf
        self.soon_s = _LOOK_EVERY_MS / 1e3
        self._stopping = self._ends_itself = False
        self._inherited: object = None
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; it sleeps until woken.

        Raises:
            OSError, RuntimeError: no file descriptor or no thread is left; nothing stays open.
        """
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        thread = threading.Thread(target=self._run, args=(reader,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            os.close(reader)
            os.close(writer)
            raise
        self._pipe, self._thread = (reader, writer), thread

    def watch(self) -> bool:
        """Begin to look, if not looking already; False when the thread is gone. Dear only if it sleeps."""
        if not self._looking:
            self._looking = True
            self._due_s = time.monotonic()
            self._wake()
        return not self.has_ended

    def stop(self, timeout_s: float) -> bool:
        """End the thread and close the pipe; False when it did not end within ``timeout_s``.

        On the thread itself: True, and it ends, and closes the pipe, without another look.
        """
        if self._thread is None or self._pipe is None:
            return True
        self._stopping = True
        if self._thread is threading.current_thread():
            self._ends_itself = True
            return True
        self._wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._close_pipe()
        self._thread = None
        return True

    def after_fork_in_child(self, inherited: object) -> None:
        """In a forked child: keep ``inherited`` for as long as the child lives, for its sockets are the parent's.

        The thread is not there, but its stack is and holds this object. So nothing is collected, at exit either, and no
        finalizer of a socket complains.
        """
        self._inherited = inherited

    def _close_pipe(self) -> None:
        pipe, self._pipe = self._pipe, None
        for descriptor in pipe or ():
            os.close(descriptor)

    def _wake(self) -> None:
        try:  # noqa: SIM105 a context manager costs a step as much as the rest
            self._bell.release()
        except RuntimeError:
            pass  # rung already
        # Rung first: who falls asleep says so before it looks whether the bell was rung.
        if self._is_fast_asleep and self._pipe is not None:
            _write_with_gil(self._pipe[1], b"!", 1)  # a pipe that is full is full of wake-ups already

    def _run(self, reader: int) -> None:
        woken = select.poll()
        woken.register(reader, select.POLLIN)
        woken_or_asked = select.poll()
        woken_or_asked.register(reader, select.POLLIN)
        for descriptor in self._watched_fds:
            woken_or_asked.register(descriptor, select.POLLIN)
        try:
            found = DrainResult.QUIET
            while not self._stopping:
                self._sleep(reader, woken_or_asked, _LOOK_AT_STUCK_MS if found is DrainResult.STUCK else None)
                self._looking = True
                found = self._look(reader, woken, woken_or_asked)
        except Exception:  # noqa: BLE001 - the thread ends here: nobody else would report it
            _log.exception("the KV-event backstop died: batches go out, and replays are served, inside publish() only")
        finally:
            self.has_ended = True
            self._stop_deferring()
            if self._ends_itself:
                self._close_pipe()

    def _sleep(self, reader: int, woken_or_asked: select.poll, at_most_ms: float | None) -> None:
        """Sleep until somebody rings, or a peer wants something, or for ``at_most_ms``."""
        for nap_s in _NAPS_S:
            if self._bell.acquire(timeout=nap_s):
                return
            found = _wait(woken_or_asked, reader, 0)
            if found:
                _forget_closed(woken_or_asked, found)
                return
        self._is_fast_asleep = True
        try:
            if not self._bell.acquire(blocking=False):
                _forget_closed(woken_or_asked, _wait(woken_or_asked, reader, at_most_ms))
                self._bell.acquire(blocking=False)  # whoever has written to the pipe has rung, too
        finally:
            self._is_fast_asleep = False

    def _drain(self) -> DrainResult:
        """No reference to who is drained outlives this call. Whoever is gone leaves nothing to look at."""
        drained = self._drained()
        if drained is None:
            return DrainResult.QUIET
        return drained.drain_for_scheduler(max(0.0, time.monotonic() - self._due_s))

    def _stop_deferring(self) -> None:
        drained = self._drained()
        if drained is not None:
            drained.stop_deferring()

    def _look(self, reader: int, woken: select.poll, woken_or_asked: select.poll) -> DrainResult:
        """DrainResult until there has been nothing to do for a while; returns what the last look found."""
        quiet_looks = 0
        found = DrainResult.QUIET
        while not self._stopping:
            found = self._drain()
            quiet_looks = quiet_looks + 1 if found is DrainResult.QUIET else 0
            if quiet_looks > _LOOKS_BEFORE_SLEEP or found in (DrainResult.LULL, DrainResult.STUCK):
                self._due_s = math.inf
                self._looking = False
                self._stop_deferring()
                # A batch may have been deferred just before the flags fell: its publisher saw them still set.
                found = self._drain()
                if found in (DrainResult.QUIET, DrainResult.LULL, DrainResult.STUCK):
                    return found
                self._looking = True
            self._wait_after(found, reader, woken, woken_or_asked)
        return found

    def _wait_after(self, found: DrainResult, reader: int, woken: select.poll, woken_or_asked: select.poll) -> None:
        if found is DrainResult.BUSY:
            self._due_s = time.monotonic()
        elif found in (DrainResult.SHARING, DrainResult.HANDED_OVER):
            wait_s = _BREATHER_S if found is DrainResult.SHARING else self.soon_s
            self._due_s = time.monotonic() + wait_s
            time.sleep(wait_s)  # shorter than a wait for descriptors can be
        else:
            self._due_s = time.monotonic() + _LOOK_EVERY_MS / 1e3
            _wait(woken if found is DrainResult.DRAINING else woken_or_asked, reader, _LOOK_EVERY_MS)


def _wait(poller: select.poll, reader: int, timeout_ms: float | None = None) -> list[tuple[int, int]]:
    """Wait for any of the poller's descriptors; what woke the thread through its pipe is taken out of it."""
    found = poller.poll(timeout_ms)
    for descriptor, event in found:
        if descriptor == reader and event & select.POLLIN:
            os.read(reader, 4096)
    return found


def _forget_closed(poller: select.poll, found: list[tuple[int, int]]) -> None:
    """A descriptor that somebody closed would wake the thread again and again."""
    for descriptor, event in found:
        if event & select.POLLNVAL:
            poller.unregister(descriptor)
