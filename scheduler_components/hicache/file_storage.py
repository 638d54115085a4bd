"""FilePageStore: a page store in a directory, shared by any number of processes and kept over restarts.

A rename makes each page visible atomically. Guarantees:

- If a writer is killed, only the batch being written is lost. Its unfinished files remain until the next open removes
  them. At worst the ledger misses one batch, which the next open or eviction counts again.
- If the machine fails, names may be lost, but no page is torn: all pages of a batch are synchronised to the disk before
  the first of them gets its name. The files of a batch are synchronised in parallel, so that the file system's journal
  commits them as a group; one after the other takes three times as long.
- If the directory is removed, every call fails with a `StorageError`. When it exists again, for example because its
  file system is mounted again, the next call opens it and continues.
- Foreign files and directories in the place of pages are neither read, counted nor removed. The page that would have
  that name is not stored.

``pages/ab/<name>`` is a page. ``unfinished/<writer>/`` holds the unfinished files of a writer and a file that it keeps
locked. ``ledger`` contains the bytes in use and is the lock for all changes.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from hashlib import sha256
from io import FileIO
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from scheduler_components._internal.file_lock import FileLock, acquire_file_lock, open_file_lock
from scheduler_components._internal.validators import check_integer
from scheduler_components.errors import StartError, StorageError
from scheduler_components.ports import PageBytes

__all__ = ["PRIVATE_MODE", "FilePageStore", "PageDirectory", "open_file_page_store", "open_page_directory"]

PRIVATE_MODE = 0o700
"""Access for the engine's account only, because pages are derived from users' prompts."""

_LEDGER_BYTES = 8
_NAME_DIGITS = 64
_FOLDER_DIGITS = 2
_MAX_SYNCS = 16  # threads that synchronise files; more gained nothing on ext4


class PageDirectory:
    """An open directory of pages. Create it with ``open_page_directory``. All methods may raise OSError.

    It is closed in a forked child, which must open its own.
    """

    def __init__(self, root: Path, own_folder: Path, ledger: FileLock, writer: FileLock) -> None:
        self.root = root
        self.pages_folder = root / "pages"
        self._own_folder = own_folder
        self._ledger = ledger
        self._writer = writer

    @property
    def own_folder(self) -> Path:
        """The folder for unfinished files of this writer; OSError in a forked child."""
        if not self._writer.is_open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(self._own_folder))
        return self._own_folder

    @property
    def is_in_place(self) -> bool:
        """Whether the path still leads to this directory. A closed one is in place: only its owner opens it again."""
        if not self._writer.is_open:
            return True
        try:
            found = (self.root / "ledger").stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(found, os.fstat(self._ledger.descriptor))

    @property
    def used_bytes(self) -> int:
        """Bytes of all pages according to the ledger."""
        return int.from_bytes(os.pread(self._ledger.descriptor, _LEDGER_BYTES, 0), "big")

    def write_used_bytes(self, used_bytes: int) -> None:
        """Write the bytes of all pages to the ledger. The caller holds the lock."""
        os.pwrite(self._ledger.descriptor, used_bytes.to_bytes(_LEDGER_BYTES, "big"), 0)

    def locked(self) -> AbstractContextManager[None]:
        """Return a context manager that excludes changes by other processes."""
        return self._ledger.held()

    def pages(self) -> Iterator[tuple[int, Path, int]]:
        """Yield (last use in nanoseconds, path, bytes) of every page. The caller holds the lock."""
        for path in self.pages_folder.glob("*/*"):
            status = _status_of(path)
            if status is not None and path.name.startswith(path.parent.name) and len(path.name) == _NAME_DIGITS:
                yield status.st_mtime_ns, path, status.st_size

    def close(self) -> None:
        """Remove the unfinished files and release the locks. Safe to call twice."""
        if self._writer.is_open:
            shutil.rmtree(self._own_folder, ignore_errors=True)
            self._writer.close()
            self._ledger.close()


def open_page_directory(root: Path) -> PageDirectory:
    """Open or create a directory of pages; remove the files of killed writers and recount the pages.

    Raises:
        OSError: the directory cannot be created or written.
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
            # Locked before the ledger is released, so that no other process takes this writer for dead.
            writer = acquire_file_lock(own_folder / "writer")
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
            acquire_file_lock(folder / "writer").close()
        except BlockingIOError:
            continue  # its writer is running
        except (FileNotFoundError, NotADirectoryError):
            continue  # its writer has just removed it, or it is a foreign file
        shutil.rmtree(folder, ignore_errors=True)  # its writer may be removing it concurrently


class _Unfinished(NamedTuple):
    """A page that is being stored: its unfinished file, its final path and its content."""

    source: Path
    target: Path
    page: PageBytes


class FilePageStore:
    """Pages as files, with LRU eviction over all processes. Create it with ``open_file_page_store``.

    An eviction scans the directory, so it frees a sixteenth of the capacity in addition.
    """

    def __init__(self, directory: PageDirectory, capacity_bytes: int, clock_ns: Callable[[], int]) -> None:
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._clock_ns = clock_ns
        self._last_use_ns = 0

    @property
    def used_bytes(self) -> int:
        return self._directory.used_bytes

    def batch_exists(self, keys: Sequence[str]) -> int:
        with self._calling("batch_exists"):
            return next((at for at, key in enumerate(keys) if _status_of(self._path(key)) is None), len(keys))

    def batch_get(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._calling("batch_get"):
            return [self._read(self._path(key)) for key in keys]

    def batch_set(self, keys: Sequence[str], pages: Sequence[PageBytes]) -> list[bool]:
        new: list[_Unfinished] = []
        with self._calling("batch_set"):
            try:
                for key, page in zip(keys, pages, strict=True):
                    target = self._path(key)
                    if not self._touch(target):
                        new.append(_Unfinished(self._directory.own_folder / str(len(new)), target, page))
                _do_to_each(new, _write_to_disk)
                with self._directory.locked():
                    self._commit(new)
            finally:
                for unfinished in new:
                    unfinished.source.unlink(missing_ok=True)
            return [_status_of(self._path(key)) is not None for key in keys]

    def register(self, memory: memoryview) -> None:
        """Do nothing: files can be read into any memory."""

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        with self._calling("batch_get_into"):
            return [self._read_into(self._path(key), page) for key, page in zip(keys, pages, strict=True)]

    def batch_put_from(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        return self.batch_set(keys, pages)

    def delete(self, keys: Sequence[str]) -> int:
        with self._calling("delete"), self._directory.locked():
            sizes = [size for key in keys if (size := _remove(self._path(key))) is not None]
            self._directory.write_used_bytes(max(0, self.used_bytes - sum(sizes)))
            return len(sizes)

    def clear(self) -> int:
        """Remove every page of all processes; return how many. Caches call ``clear_storage_index`` in the same step.

        Raises:
            StorageError: the directory cannot be changed.
        """
        with self._calling("clear"), self._directory.locked():
            sizes = [size for _, path, _ in list(self._directory.pages()) if (size := _remove(path)) is not None]
            self._directory.write_used_bytes(sum(size for _, _, size in self._directory.pages()))
            return len(sizes)

    def close(self) -> None:
        self._directory.close()

    @contextmanager
    def _calling(self, operation: str) -> Iterator[None]:
        """Raise OSError of the block as StorageError. Open the directory again first if it was removed and is back."""
        try:
            removed = self._directory
            if not removed.is_in_place:
                if not removed.root.is_dir():
                    raise FileNotFoundError(errno.ENOENT, "the directory was removed", str(removed.root))
                self._directory = open_page_directory(removed.root)
                removed.close()
            yield
        except OSError as error:
            raise StorageError("file", operation, str(error)) from error

    def _path(self, key: str) -> Path:
        # Hashed, so that every key gives a short, plain file name.
        name = sha256(key.encode()).hexdigest()
        return self._directory.pages_folder / name[:_FOLDER_DIGITS] / name

    def _read(self, path: Path) -> bytes | None:
        if _status_of(path) is None:
            return None
        try:
            page = path.read_bytes()
        except FileNotFoundError:
            return None  # just evicted by another process
        self._touch(path)
        return page

    def _read_into(self, path: Path, page: memoryview) -> bool:
        if _status_of(path) is None:
            return False
        try:
            with path.open("rb", buffering=0) as file:
                is_whole = os.fstat(file.fileno()).st_size == len(page) and _read_whole(file, page)
        except FileNotFoundError:
            return False  # just evicted by another process
        self._touch(path)
        return is_whole

    def _touch(self, path: Path) -> bool:
        """Mark a page as the most recently used of this process; return False if it does not exist."""
        if _status_of(path) is None:
            return False
        self._last_use_ns = max(self._clock_ns(), self._last_use_ns + 1)
        try:
            os.utime(path, ns=(self._last_use_ns, self._last_use_ns))
        except FileNotFoundError:
            return False
        return True

    def _commit(self, new: Sequence[_Unfinished]) -> None:
        used = self.used_bytes
        wanted = sum(len(unfinished.page) for unfinished in new)
        if used + wanted > self._capacity_bytes:
            used = self._evict(wanted)
        try:
            for source, target, page in new:
                if used + len(page) <= self._capacity_bytes and _is_free(target):
                    self._touch(source)
                    source.replace(target)
                    used += len(page)
        finally:
            self._directory.write_used_bytes(used)

    def _evict(self, wanted_bytes: int) -> int:
        """Remove the least recently used pages until ``wanted_bytes`` and a sixteenth fit; return the bytes in use."""
        pages = sorted(self._directory.pages())
        used = sum(size for _, _, size in pages)
        target = max(0, self._capacity_bytes - wanted_bytes - self._capacity_bytes // 16)
        for _, path, size in pages:
            if used <= target:
                break
            if _remove(path) is not None:
                used -= size
        return used


def _read_whole(file: FileIO, page: memoryview) -> bool:
    """Fill a buffer from a file; return False if the file is too short."""
    num_read = 0
    while num_read < len(page):
        count = file.readinto(page[num_read:])
        if not count:
            return False
        num_read += count
    return True


def _write_to_disk(unfinished: _Unfinished) -> None:
    with unfinished.source.open("wb") as file:
        file.write(unfinished.page)
        file.flush()
        # Before the rename, so that after a power loss the name cannot refer to unwritten blocks.
        os.fsync(file.fileno())


def _do_to_each(new: Sequence[_Unfinished], work: Callable[[_Unfinished], None]) -> None:
    """Call ``work`` for each page on several threads; raise the first exception after all threads have ended.

    These are daemon threads, because the interpreter joins an executor's threads at exit and a file system may hang.
    """
    left, errors = deque(new), deque[BaseException]()

    def work_on() -> None:
        with suppress(IndexError):  # raised when none is left
            while not errors:
                unfinished = left.popleft()
                try:
                    work(unfinished)
                except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
                    errors.append(error)

    others = [Thread(target=work_on, name="page-sync", daemon=True) for _ in range(min(len(new), _MAX_SYNCS) - 1)]
    for thread in others:
        thread.start()
    work_on()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def _status_of(path: Path) -> os.stat_result | None:
    """Return the status of a page file; None if there is none or the path is not a regular file."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _is_free(target: Path) -> bool:
    """Return whether the path of a page is free. Create its folder."""
    try:
        target.parent.mkdir(exist_ok=True, mode=PRIVATE_MODE)
    except FileExistsError:
        return False  # a foreign file has the name of the folder
    return not os.path.lexists(target)


def _remove(path: Path) -> int | None:
    """Remove a page and return its size; None if it does not exist or must not be removed."""
    status = _status_of(path)
    if status is None:
        return None
    try:
        path.unlink()
    except (FileNotFoundError, PermissionError):
        return None
    return status.st_size


def open_file_page_store(
    directory: str | Path, *, capacity_bytes: int, clock_ns: Callable[[], int] = time.time_ns
) -> FilePageStore:
    """Open or create a page store in a directory.

    Args:
        directory: on a file system with ``flock``. Processes with the same directory share pages.
        capacity_bytes: the largest number of bytes of pages, the same in every process.
        clock_ns: time of use, for the LRU order across processes and restarts.

    Raises:
        ConfigError: ``capacity_bytes`` is below 1.
        StartError: the directory cannot be created or written.
    """
    check_integer("capacity_bytes", capacity_bytes)
    try:
        opened = open_page_directory(Path(directory))
    except OSError as error:
        raise StartError(str(directory), str(error), "give a directory that this account may write to") from error
    return FilePageStore(opened, capacity_bytes, clock_ns)
