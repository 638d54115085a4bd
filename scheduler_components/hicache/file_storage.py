"""A page store in a directory, shared by any number of processes and kept over restarts.

A page appears whole, by rename, or not at all. A writer that is killed leaves unfinished files, which the next open
removes, and at worst a ledger that is one batch short, which the next open or eviction counts anew.

``pages/ab/<name>`` is one page; ``unfinished/<writer>/`` is what a writer has not finished, with a lock that the writer
holds while it lives; ``ledger`` holds the bytes in use and is the lock of all changes.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from scheduler_components.errors import StartError, StorageError
from scheduler_components.file_lock import FileLock, open_file_lock, take_file_lock
from scheduler_components.ports import PageBytes
from scheduler_components.validators import check_integer

__all__ = ["PRIVATE_MODE", "FilePageStore", "PageDirectory", "open_file_page_store", "open_page_directory"]

PRIVATE_MODE = 0o700
"""Pages are users' prompts in another form: for the engine's account only."""

_LEDGER_BYTES = 8


class PageDirectory:
    """An open directory of pages; made by ``open_page_directory``. All methods may raise OSError.

    In a forked child it is closed: a child opens a directory of its own.
    """

    def __init__(self, root: Path, own_folder: Path, ledger: FileLock, writer: FileLock) -> None:
        self.pages_folder = root / "pages"
        self._own_folder = own_folder
        self._ledger = ledger
        self._writer = writer

    @property
    def own_folder(self) -> Path:
        """Where this writer keeps what is unfinished; in a forked child, the folder is the parent's alone."""
        if not self._writer.is_open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(self._own_folder))
        return self._own_folder

    @property
    def used_bytes(self) -> int:
        """Bytes of all pages, by the ledger."""
        return int.from_bytes(os.pread(self._ledger.descriptor, _LEDGER_BYTES, 0), "big")

    def write_used_bytes(self, used_bytes: int) -> None:
        """Enter the bytes of all pages in the ledger; hold the lock."""
        os.pwrite(self._ledger.descriptor, used_bytes.to_bytes(_LEDGER_BYTES, "big"), 0)

    def locked(self) -> AbstractContextManager[None]:
        """Keep all other processes from changing the directory."""
        return self._ledger.held()

    def pages(self) -> Iterator[tuple[int, Path, int]]:
        """Give last use in nanoseconds, path and bytes of every page; hold the lock."""
        for path in self.pages_folder.glob("*/*"):
            status = path.stat()
            yield status.st_mtime_ns, path, status.st_size

    def close(self) -> None:
        """Let go of the locks and of what is unfinished. Safe to call twice."""
        if self._writer.is_open:
            shutil.rmtree(self._own_folder, ignore_errors=True)
            self._writer.close()
            self._ledger.close()


def open_page_directory(root: Path) -> PageDirectory:
    """Open, or make, a directory of pages: remove what killed writers left and count the pages anew.

    Raises:
        OSError: the directory cannot be made or written.
    """
    unfinished = root / "unfinished"
    for folder in (root / "pages", unfinished):
        folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_MODE)
    ledger = open_file_lock(root / "ledger")
    try:
        with ledger.held():
            _remove_dead_writers(unfinished)
            own_folder = unfinished / uuid.uuid4().hex
            own_folder.mkdir(mode=PRIVATE_MODE)
            # Locked before the ledger is free again, so that no other process takes this writer for dead.
            writer = take_file_lock(own_folder / "writer")
    except OSError:
        ledger.close()
        raise
    directory = PageDirectory(root, own_folder, ledger, writer)
    try:
        with directory.locked():
            directory.write_used_bytes(sum(size for _, _, size in directory.pages()))
    except OSError:
        directory.close()
        raise
    return directory


def _remove_dead_writers(unfinished: Path) -> None:
    for folder in unfinished.iterdir():
        try:
            take_file_lock(folder / "writer").close()
        except BlockingIOError:
            continue  # its writer lives
        shutil.rmtree(folder)


class _Unfinished(NamedTuple):
    """A page on its way: where it is written, where it goes, and its length."""

    source: Path
    target: Path
    num_bytes: int


class FilePageStore:
    """Pages as files, the least recently used by any process evicted first. Made by ``open_file_page_store``.

    Eviction scans the directory, so it makes room for a sixteenth of the capacity more than is needed.
    """

    def __init__(self, directory: PageDirectory, capacity_bytes: int, clock_ns: Callable[[], int]) -> None:
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._clock_ns = clock_ns
        self._last_use_ns = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all pages in the directory."""
        return self._directory.used_bytes

    def batch_exists(self, keys: Sequence[str]) -> int:
        with _as_storage_error("batch_exists"):
            return next((at for at, key in enumerate(keys) if not self._path(key).exists()), len(keys))

    def batch_get(self, keys: Sequence[str]) -> list[bytes | None]:
        with _as_storage_error("batch_get"):
            return [self._read(self._path(key)) for key in keys]

    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> list[bool]:
        new: list[_Unfinished] = []
        with _as_storage_error("batch_set"):
            try:
                for key, page in zip(keys, pages, strict=True):
                    target = self._path(key)
                    if not self._touch(target):
                        new.append(_Unfinished(self._directory.own_folder / str(len(new)), target, len(page)))
                        self._write(new[-1].source, page)
                with self._directory.locked():
                    self._take_in(new)
            finally:
                for unfinished in new:
                    unfinished.source.unlink(missing_ok=True)
            return [self._path(key).exists() for key in keys]

    def delete(self, keys: Sequence[str]) -> int:
        with _as_storage_error("delete"), self._directory.locked():
            sizes = [size for key in keys if (size := _remove(self._path(key))) is not None]
            self._directory.write_used_bytes(max(0, self.used_bytes - sum(sizes)))
            return len(sizes)

    def close(self) -> None:
        self._directory.close()

    def _path(self, key: str) -> Path:
        # Hashed: any key gives a short, plain name inside the directory.
        name = sha256(key.encode()).hexdigest()
        return self._directory.pages_folder / name[:2] / name

    def _read(self, path: Path) -> bytes | None:
        try:
            page = path.read_bytes()
        except FileNotFoundError:
            return None
        self._touch(path)
        return page

    def _touch(self, path: Path) -> bool:
        """Mark a page as used now, if it is there; strictly later than this process's last use of any page."""
        self._last_use_ns = max(self._clock_ns(), self._last_use_ns + 1)
        try:
            os.utime(path, ns=(self._last_use_ns, self._last_use_ns))
        except FileNotFoundError:
            return False
        return True

    def _write(self, path: Path, page: PageBytes) -> None:
        with path.open("wb") as file:
            file.write(page)
            file.flush()
            # Before the rename: after a power loss the name must not stand for blocks that were never written.
            os.fsync(file.fileno())
        self._touch(path)

    def _take_in(self, new: Sequence[_Unfinished]) -> None:
        used = self.used_bytes
        wanted = sum(unfinished.num_bytes for unfinished in new)
        if used + wanted > self._capacity_bytes:
            used = self._evict(wanted)
        try:
            for source, target, num_bytes in new:
                if not target.exists() and used + num_bytes <= self._capacity_bytes:
                    target.parent.mkdir(exist_ok=True, mode=PRIVATE_MODE)
                    source.replace(target)
                    used += num_bytes
        finally:
            self._directory.write_used_bytes(used)

    def _evict(self, wanted_bytes: int) -> int:
        """Remove the least recently used pages until ``wanted_bytes`` and the spare fit; return the bytes left."""
        pages = sorted(self._directory.pages())
        used = sum(size for _, _, size in pages)
        target = max(0, self._capacity_bytes - wanted_bytes - self._capacity_bytes // 16)
        for _, path, size in pages:
            if used <= target:
                break
            path.unlink()
            used -= size
        return used


def _remove(path: Path) -> int | None:
    """Remove a file and return its size; None when it was not there."""
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return None
    return size


@contextmanager
def _as_storage_error(operation: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError("file", operation, str(error)) from error


def open_file_page_store(
    directory: str | Path, *, capacity_bytes: int, clock_ns: Callable[[], int] = time.time_ns
) -> FilePageStore:
    """Open, or make, a page store in a directory.

    Args:
        directory: on a file system with ``flock``; processes that share pages give the same one.
        capacity_bytes: most bytes of pages in it; the same in every process.
        clock_ns: orders the uses of pages across processes and restarts, and nothing else.

    Raises:
        ConfigError: ``capacity_bytes`` is below 1.
        StartError: the directory cannot be made or written.
    """
    check_integer("capacity_bytes", capacity_bytes)
    try:
        opened = open_page_directory(Path(directory))
    except OSError as error:
        raise StartError(str(directory), str(error), "give a directory that this account may write to") from error
    return FilePageStore(opened, capacity_bytes, clock_ns)
