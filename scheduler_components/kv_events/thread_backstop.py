"""Backstop: a thread that drains the publisher when the scheduler does not.

A scheduler that calls ``idle()`` encodes, sends and serves replays there. Another scheduler leaves this work to the
thread, as long as it lets the thread have the GIL; the thread measures its own delay. The backstop sleeps until it is
woken by the first waiting batch of a busy period, or by the replay socket. Then it polls every few milliseconds, and
sleeps again when there is nothing left to watch.

For the first quarter of a second it naps: it waits on a lock, because releasing a lock costs the scheduler a third of
writing one byte to a pipe (8 us compared with 25 with cold caches, which a step of an engine leaves). A replay client
then waits until the nap ends. After that, it sleeps on its descriptors without waking up; while a replay client is
stuck, it wakes up occasionally.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import select
import threading
import time
import weakref
from typing import Protocol

__all__ = ["Backstop", "Drainable"]

_log = logging.getLogger(__name__)

_MAX_POLL_S = 0.01
"""The thread sleeps when the next poll is later than this."""

_MIN_WATCH_S = 0.006
"""A shorter wait is a plain sleep. It leaves the descriptors, which may be readable, to the scheduler."""

_NAPS_S = (0.008, 0.016, *(0.032,) * 7)
"""Between two steps that publish, an engine decodes for some milliseconds. Each nap takes the GIL once."""

# ``os.write`` releases the GIL. The thread then takes it immediately and keeps it for a slice of work, while the
# scheduler waits for it inside ``publish()`` (380 us at the median inside vLLM, 80 with this call). One byte into a
# pipe never blocks.
_write_with_gil = ctypes.PyDLL(None).write
_write_with_gil.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write_with_gil.restype = ctypes.c_ssize_t


class Drainable(Protocol):
    """The object that the backstop drains."""

    def poll(self, late_s: float) -> float:
        """Drain what the scheduler has left. Return the seconds until the next poll, infinite if there is none to do.

        Args:
            late_s: delay of this poll: the GIL was not free, or the machine is busy.
        """
        ...

    def stop_deferring(self) -> None:
        """Leave no further work to the backstop without waking it, because it stops polling."""
        ...


class Backstop:
    """One daemon thread with a lock and a pipe to wake it. ``start`` creates them, ``stop`` ends them.

    Args:
        drained: polled by the thread. The backstop keeps only a weak reference: the finalizer of an unreferenced
            publisher closes it, possibly on this thread.
        watched_fds: file descriptors that become readable when a peer needs service.
        name: the thread's name.

    Attributes:
        has_ended: True after the thread has stopped or died.
        due_s: time of the next poll (``time.monotonic``), infinite while the thread sleeps.
    """

    __slots__ = (
        "_bell",
        "_drained",
        "_ends_itself",
        "_inherited",
        "_is_asleep",
        "_is_polling",
        "_name",
        "_pipe",
        "_stopping",
        "_thread",
        "_watched_fds",
        "due_s",
        "has_ended",
    )

    def __init__(self, drained: Drainable, *, watched_fds: tuple[int, ...], name: str) -> None:
        self._drained = weakref.ref(drained)
        self._watched_fds = watched_fds
        self._name = name
        self.has_ended = False
        self._bell = threading.Lock()  # released to wake the thread from a nap
        self._bell.acquire()
        self._is_asleep = False
        self._is_polling = False
        self.due_s = math.inf
        self._stopping = self._ends_itself = False
        self._inherited: object = None
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, which sleeps until it is woken.

        Raises:
            OSError, RuntimeError: no file descriptor or no thread is available; nothing stays open.
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
        """Start to poll, if the thread is not polling already. Expensive only while the thread sleeps.

        Returns:
            False if the thread has ended.
        """
        if not self._is_polling:
            self._is_polling = True
            self.due_s = time.monotonic()
            self._wake()
        return not self.has_ended

    def stop(self, timeout_s: float) -> bool:
        """End the thread and close the pipe. Return False if it did not end within ``timeout_s``.

        On the thread itself, return True: the thread ends and closes the pipe without another poll.
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
        """In a forked child, keep ``inherited`` alive, because its sockets belong to the parent.

        The thread does not exist there, but its stack does and refers to this object. So nothing is collected, even at
        exit, and no finalizer of a socket runs.
        """
        self._inherited = inherited

    def _close_pipe(self) -> None:
        pipe, self._pipe = self._pipe, None
        for descriptor in pipe or ():
            os.close(descriptor)

    def _wake(self) -> None:
        try:  # noqa: SIM105 - a context manager would double the cost
            self._bell.release()
        except RuntimeError:
            pass  # already released
        # Release first: a thread that falls asleep sets its flag before it tests the lock.
        if self._is_asleep and self._pipe is not None:
            _write_with_gil(self._pipe[1], b"!", 1)  # a full pipe already contains a wake-up

    def _run(self, reader: int) -> None:
        woken_or_asked = select.poll()
        woken_or_asked.register(reader, select.POLLIN)
        for descriptor in self._watched_fds:
            woken_or_asked.register(descriptor, select.POLLIN)
        try:
            wait_s = math.inf
            while not self._stopping:
                self._sleep(reader, woken_or_asked, wait_s)
                self._is_polling = True
                wait_s = self._poll(reader, woken_or_asked)
        except Exception:  # noqa: BLE001 - the thread ends here, and no other code would report it
            _log.exception("the KV-event backstop died: publish() alone sends batches and serves replays from now on")
        finally:
            self.has_ended = True
            self._stop_deferring()
            if self._ends_itself:
                self._close_pipe()

    def _sleep(self, reader: int, woken_or_asked: select.poll, at_most_s: float) -> None:
        """Sleep until the thread is woken, a peer needs service, or ``at_most_s`` have passed."""
        for nap_s in _NAPS_S:
            if self._bell.acquire(timeout=nap_s):
                return
            found = _wait(woken_or_asked, reader, 0)
            if found:
                _forget_closed(woken_or_asked, found)
                return
        self._is_asleep = True
        try:
            if not self._bell.acquire(blocking=False):
                at_most_ms = None if at_most_s == math.inf else at_most_s * 1e3
                _forget_closed(woken_or_asked, _wait(woken_or_asked, reader, at_most_ms))
                self._bell.acquire(blocking=False)  # the writer to the pipe has released the lock, too
        finally:
            self._is_asleep = False

    def _drain(self) -> float:
        """Drain once. Keep no reference to the drained object after the call; without it there is nothing to do."""
        drained = self._drained()
        return math.inf if drained is None else drained.poll(max(0.0, time.monotonic() - self.due_s))

    def _stop_deferring(self) -> None:
        drained = self._drained()
        if drained is not None:
            drained.stop_deferring()

    def _poll(self, reader: int, woken_or_asked: select.poll) -> float:
        """Poll until there is nothing to do for a while. Return the seconds for which the thread may sleep."""
        wait_s = 0.0
        while not self._stopping:
            wait_s = self._drain()
            if wait_s > _MAX_POLL_S:
                self.due_s = math.inf
                self._is_polling = False
                self._stop_deferring()
                # A batch may have been deferred just before the flags were cleared, because its publisher still saw
                # them set.
                wait_s = self._drain()
                if wait_s > _MAX_POLL_S:
                    break
                self._is_polling = True
            self.due_s = time.monotonic() + wait_s
            if wait_s < _MIN_WATCH_S:
                time.sleep(wait_s)
            else:
                _wait(woken_or_asked, reader, wait_s * 1e3)
        return wait_s


def _wait(poller: select.poll, reader: int, timeout_ms: float | None) -> list[tuple[int, int]]:
    """Wait for any of the poller's descriptors, and empty the wake-up pipe."""
    found = poller.poll(timeout_ms)
    for descriptor, event in found:
        if descriptor == reader and event & select.POLLIN:
            os.read(reader, 4096)
    return found


def _forget_closed(poller: select.poll, found: list[tuple[int, int]]) -> None:
    """Unregister closed descriptors, which would wake the thread repeatedly."""
    for descriptor, event in found:
        if event & select.POLLNVAL:
            poller.unregister(descriptor)
