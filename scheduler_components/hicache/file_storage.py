"""A page store in a directory, shared by any number of processes and kept over restarts.

A page appears whole, by rename, or not at all. What holds whatever happens:

- A writer that is killed loses the batch that it was at and nothing else. It leaves unfinished files, which the next
  open removes, and at worst a ledger that is one batch short, which the next open or eviction counts anew.
- A machine that goes down loses names, never contents: each page of a batch is on the disk before the first page of
  that batch gets its name. The files of a batch are synchronised together, so that the file system's journal writes
  them as one group: one after the other costs three times as long.
- What else lies where pages are (a directory in the place of a page, a foreign file) is neither read, counted nor
  removed, and costs the page whose place it takes.

``pages/ab/<name>`` is one page; ``unfinished/<writer>/`` is what a writer has not finished, with a lock that the writer
holds while it lives; ``ledger`` holds the bytes in use and is the lock of all changes.
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

from scheduler_components.errors import StartError, StorageError
from scheduler_components.file_lock import FileLock, acquire_file_lock, open_file_lock
from scheduler_components.ports import PageBytes
from scheduler_components.validators import check_integer

__all__ = ["PRIVATE_MODE", "FilePageStore", "PageDirectory", "open_file_page_store", "open_page_directory"]

PRIVATE_MODE = 0o700
"""Pages are users' prompts in another form: for the engine's account only."""

_LEDGER_BYTES = 8
_NAME_DIGITS = 64
_FOLDER_DIGITS = 2
_MAX_SYNCS = 16  # files synchronised at once: more gained nothing on ext4, and each is a thread


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
            status = _status_of(path)
            if status is not None and path.name.startswith(path.parent.name) and len(path.name) == _NAME_DIGITS:
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
            continue  # its writer lives
        except (FileNotFoundError, NotADirectoryError):
            continue  # its writer has just closed it, or it is no writer's
        shutil.rmtree(folder, ignore_errors=True)  # a writer that closes removes it at the same time


class _Unfinished(NamedTuple):
    """A page on its way: where it is written, where it goes, and what it holds."""

    source: Path
    target: Path
    page: PageBytes


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
            return next((at for at, key in enumerate(keys) if _status_of(self._path(key)) is None), len(keys))

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
                        new.append(_Unfinished(self._directory.own_folder / str(len(new)), target, page))
                _do_to_each(new, _write_to_disk)
                with self._directory.locked():
                    self._take_in(new)
            finally:
                for unfinished in new:
                    unfinished.source.unlink(missing_ok=True)
            return [_status_of(self._path(key)) is not None for key in keys]

    def register(self, memory: memoryview) -> None:
        """Nothing: the system reads and writes any memory."""

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        with _as_storage_error("batch_get_into"):
            return [self._read_into(self._path(key), page) for key, page in zip(keys, pages, strict=True)]

    def batch_put_from(self, keys: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        return self.batch_set(keys, pages)

    def delete(self, keys: Sequence[str]) -> int:
        with _as_storage_error("delete"), self._directory.locked():
            sizes = [size for key in keys if (size := _remove(self._path(key))) is not None]
            self._directory.write_used_bytes(max(0, self.used_bytes - sum(sizes)))
            return len(sizes)

    def clear(self) -> int:
        """Remove every page, of all processes; return how many. Caches must ``clear_storage_index`` in the same step.

        Raises:
            StorageError: the directory cannot be changed.
        """
        with _as_storage_error("clear"), self._directory.locked():
            sizes = [size for _, path, _ in list(self._directory.pages()) if (size := _remove(path)) is not None]
            self._directory.write_used_bytes(sum(size for _, _, size in self._directory.pages()))
            return len(sizes)

    def close(self) -> None:
        self._directory.close()

    def _path(self, key: str) -> Path:
        # Hashed: any key gives a short, plain name inside the directory.
        name = sha256(key.encode()).hexdigest()
        return self._directory.pages_folder / name[:_FOLDER_DIGITS] / name

    def _read(self, path: Path) -> bytes | None:
        if _status_of(path) is None:
            return None
        try:
            page = path.read_bytes()
        except FileNotFoundError:
            return None  # evicted by another process just now
        self._touch(path)
        return page

    def _read_into(self, path: Path, page: memoryview) -> bool:
        if _status_of(path) is None:
            return False
        try:
            with path.open("rb", buffering=0) as file:
                is_whole = os.fstat(file.fileno()).st_size == len(page) and _read_whole(file, page)
        except FileNotFoundError:
            return False  # evicted by another process just now
        self._touch(path)
        return is_whole

    def _touch(self, path: Path) -> bool:
        """Mark a page as used now, if it is there; strictly later than this process's last use of any page."""
        if _status_of(path) is None:
            return False
        self._last_use_ns = max(self._clock_ns(), self._last_use_ns + 1)
        try:
            os.utime(path, ns=(self._last_use_ns, self._last_use_ns))
        except FileNotFoundError:
            return False
        return True

    def _take_in(self, new: Sequence[_Unfinished]) -> None:
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
        """Remove the least recently used pages until ``wanted_bytes`` and the spare fit; return the bytes left."""
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
    """Fill a buffer from a file; False where the file ends before."""
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
        # Before the rename: after a power loss the name must not stand for blocks that were never written.
        os.fsync(file.fileno())


def _do_to_each(new: Sequence[_Unfinished], work: Callable[[_Unfinished], None]) -> None:
    """Do one thing to each, several at a time; when all have ended, what the first raised is raised.

    No executor's threads: the interpreter waits for those when it ends, also where a file system never answers.
    """
    left, errors = deque(new), deque[BaseException]()

    def work_on() -> None:
        with suppress(IndexError):  # nothing is left
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
    """Return a page's status; None where there is no page, whatever else may be there."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _is_free(target: Path) -> bool:
    """True where a page may go; makes its folder."""
    try:
        target.parent.mkdir(exist_ok=True, mode=PRIVATE_MODE)
    except FileExistsError:
        return False  # something else is in the folder's place
    return not os.path.lexists(target)


def _remove(path: Path) -> int | None:
    """Remove a page and return its size; None when it was not there, or stays because the system protects it."""
    status = _status_of(path)
    if status is None:
        return None
    try:
        path.unlink()
    except (FileNotFoundError, PermissionError):
        return None
    return status.st_size


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
