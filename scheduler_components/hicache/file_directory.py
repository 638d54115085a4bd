"""The directory of a file page store: its layout, the lock of its changes, and what killed writers leave behind.

``pages/ab/<name>`` is one page; ``unfinished/<writer>/`` is what a writer has not finished, with a lock that the writer
holds while it lives; ``ledger`` holds the bytes in use and is the lock of all changes. Linux and other systems with
``flock``; local file systems and NFS 4.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["PRIVATE_MODE", "PageDirectory", "open_page_directory"]

PRIVATE_MODE = 0o700
"""Pages are users' prompts in another form: for the engine's account only."""

_LEDGER_BYTES = 8
_CLOSED = -1  # no file: the system refuses it, where the old number could be somebody else's file by now


class PageDirectory:
    """An open directory of pages; made by ``open_page_directory``. All methods may raise OSError."""

    def __init__(self, root: Path, own_folder: Path, ledger_file: int, writer_file: int) -> None:
        self.pages_folder = root / "pages"
        self.own_folder = own_folder
        self._ledger_file = ledger_file
        self._writer_file = writer_file

    @property
    def used_bytes(self) -> int:
        """Bytes of all pages, by the ledger."""
        return int.from_bytes(os.pread(self._ledger_file, _LEDGER_BYTES, 0), "big")

    def write_used_bytes(self, used_bytes: int) -> None:
        """Enter the bytes of all pages in the ledger; hold the lock."""
        os.pwrite(self._ledger_file, used_bytes.to_bytes(_LEDGER_BYTES, "big"), 0)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other processes from changing the directory."""
        with _flocked(self._ledger_file):
            yield

    def pages(self) -> Iterator[tuple[int, Path, int]]:
        """Give last use in nanoseconds, path and bytes of every page; hold the lock."""
        for path in self.pages_folder.glob("*/*"):
            status = path.stat()
            yield status.st_mtime_ns, path, status.st_size

    def close(self) -> None:
        """Let go of the locks and of what is unfinished. Safe to call twice."""
        if self._ledger_file != _CLOSED:
            shutil.rmtree(self.own_folder, ignore_errors=True)
            os.close(self._writer_file)
            os.close(self._ledger_file)
            self._writer_file = self._ledger_file = _CLOSED


def open_page_directory(root: Path) -> PageDirectory:
    """Open, or make, a directory of pages: remove what killed writers left and count the pages anew.

    Raises:
        OSError: the directory cannot be made or written.
    """
    unfinished = root / "unfinished"
    for folder in (root / "pages", unfinished):
        folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_MODE)
    ledger_file = _open_lock(root / "ledger")
    try:
        with _flocked(ledger_file):
            _remove_dead_writers(unfinished)
            own_folder = unfinished / uuid.uuid4().hex
            own_folder.mkdir(mode=PRIVATE_MODE)
            # Locked before the ledger is free again, so that no other process takes this writer for dead.
            writer_file = _open_lock(own_folder / "writer")
            fcntl.flock(writer_file, fcntl.LOCK_EX)
    except OSError:
        os.close(ledger_file)
        raise
    directory = PageDirectory(root, own_folder, ledger_file, writer_file)
    try:
        with directory.locked():
            directory.write_used_bytes(sum(size for _, _, size in directory.pages()))
    except OSError:
        directory.close()
        raise
    return directory


def _remove_dead_writers(unfinished: Path) -> None:
    for folder in unfinished.iterdir():
        writer_file = _open_lock(folder / "writer")
        try:
            fcntl.flock(writer_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its writer lives
        finally:
            os.close(writer_file)
        shutil.rmtree(folder)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


@contextmanager
def _flocked(file: int) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
