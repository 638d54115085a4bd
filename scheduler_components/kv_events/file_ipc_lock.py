"""One publisher an ipc path: libzmq alone would unlink whatever is there, a living publisher's socket included."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from contextlib import suppress

from scheduler_components.errors import StartError
from scheduler_components.fork_hook import tell_of_forks

__all__ = ["IpcPathLock", "lock_ipc_path"]


class IpcPathLock:
    """A lock file beside an ipc path, held for as long as the path is bound; made by ``lock_ipc_path``."""

    __slots__ = ("__weakref__", "_descriptor", "_path")

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        tell_of_forks(self)

    def release(self) -> None:
        """Remove the socket's file, which libzmq leaves there, and unlock. Safe to call twice.

        Call it when the socket is closed, down to libzmq's own thread.
        """
        if self._descriptor >= 0:
            with suppress(FileNotFoundError):
                os.unlink(self._path)  # noqa: PTH108 - a plain path, no Path needed
            self.unlock()

    def unlock(self) -> None:
        """Remove the lock file, then unlock: who waits for the file finds it gone, and makes one of its own."""
        with suppress(FileNotFoundError):  # who cleaned the directory removed it too
            os.unlink(_lock_path(self._path))  # noqa: PTH108
        self.close()

    def close(self) -> None:
        """Close the descriptor, and with it this process's part of the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def disown(self) -> None:
        """In a forked child: close its copy. A lock must end with its owner, not with the last child."""
        self.close()


def _lock_path(path: str) -> str:
    return f"{path}.lock"


def lock_ipc_path(path: str) -> IpcPathLock | None:
    """Take ``path`` for this process; None in Linux's abstract namespace, which has a lock of its own.

    What a dead process left there is left to libzmq, which replaces it.

    Raises:
        StartError: another publisher or process has the path, or it is not a socket's.
    """
    if path.startswith("@"):
        return None
    while True:
        descriptor = _open(path, _lock_path(path))
        if _is_still(descriptor, _lock_path(path)):
            break
        os.close(descriptor)  # its owner removed it between our opening and our locking
    lock = IpcPathLock(path, descriptor)
    try:
        _refuse_unless_stale(path)
    except StartError:
        lock.unlock()
        raise
    return lock


def _open(path: str, lock_path: str) -> int:
    """Open and lock the lock file."""
    try:
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        mend = "give a path in a directory that this process may write to"
        raise StartError(f"ipc://{path}", f"cannot lock {lock_path} ({error.strerror})", mend) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise _taken(path) from error
    return descriptor


def _is_still(descriptor: int, lock_path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(lock_path))  # noqa: PTH116
    except FileNotFoundError:
        return False


def _taken(path: str) -> StartError:
    return StartError(
        f"ipc://{path}", "another publisher is bound there", "stop that one, or give each publisher a path of its own"
    )


def _refuse_unless_stale(path: str) -> None:
    """Also publishers that take no lock are not to be unlinked, nor are a person's files."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartError(f"ipc://{path}", "is there and is not a socket", "give a path of its own")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            pass  # somebody listens, and is busy
        except OSError as error:
            mend = "remove it, or give another path"
            raise StartError(f"ipc://{path}", f"cannot be asked who listens ({error.strerror})", mend) from error
    raise _taken(path)
