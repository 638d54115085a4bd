"""Hash every byte of a model's weight files, on several threads, and remember the digests of files that stay.

Pages of two models must never share a key, so a digest of samples is not enough: a partial merge or edited experts
change some tensors and leave the others. A file is not read again while its size, modification time and inode stay.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import repeat
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

_SEGMENT_BYTES = 64 << 20  # one file of several gigabytes is shared by all threads
_READ_BYTES = 1 << 20
_MAX_THREADS = 8  # more wait for the disk


class RememberedFile(msgspec.Struct, frozen=True):
    """The digest of a file, and the facts by which the file is recognised."""

    size_bytes: int
    modified_ns: int
    inode: int
    digest: bytes


class DigestMemory:
    """Digests of files, kept in one JSON file.

    A memory that cannot be read is empty, and one that cannot be written is not kept; both are logged. Two processes
    that write at the same time may lose an entry, which costs a later process the time to hash that file.

    Args:
        path: the JSON file. Its directory is created when digests are written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, RememberedFile]:
        """Return the remembered files by absolute path."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, RememberedFile])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("the digests in %s cannot be read (%s): every file is hashed again", self._path, error)
            return {}

    def add(self, files: Mapping[str, RememberedFile]) -> None:
        """Remember further files."""
        encoded = msgspec.json.encode({**self.read(), **files})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            written = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            try:
                written.write_bytes(encoded)
                written.replace(self._path)
            finally:
                written.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the digests of the model's files cannot be kept in %s (%s)", self._path, error)


def digest_files(paths: Sequence[Path], memory: DigestMemory | None = None) -> list[bytes]:
    """Return a digest of the content of each file.

    Args:
        paths: existing files.
        memory: skips the files that it remembers, and is given the others; None hashes all of them.

    Raises:
        OSError: a file cannot be read.
    """
    known = {} if memory is None else memory.read()
    facts = {str(path.absolute()): path.stat() for path in paths}
    found: dict[str, bytes] = {}
    fresh: dict[str, RememberedFile] = {}
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "model-digest") as threads:
        for name, status in facts.items():
            identity = (status.st_size, status.st_mtime_ns, status.st_ino)
            old = known.get(name)
            if old is not None and (old.size_bytes, old.modified_ns, old.inode) == identity:
                found[name] = old.digest
                continue
            whole = blake2b(digest_size=32)
            for segment in threads.map(_digest_segment, repeat(name), range(0, status.st_size, _SEGMENT_BYTES)):
                whole.update(segment)
            found[name] = whole.digest()
            fresh[name] = RememberedFile(*identity, whole.digest())
    if memory is not None and fresh:
        memory.add(fresh)
    return [found[name] for name in facts]


def _digest_segment(name: str, start: int) -> bytes:
    digest, left = blake2b(digest_size=32), _SEGMENT_BYTES
    with Path(name).open("rb") as file:
        file.seek(start)
        while left and (part := file.read(min(left, _READ_BYTES))):
            digest.update(part)
            left -= len(part)
    return digest.digest()
