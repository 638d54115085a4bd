"""FileDivergenceSink: write the recent decisions of a rank to a file when the ranks have diverged."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import msgspec

from scheduler_components._internal.file_unused_path import unused_path
from scheduler_components.values import DecisionDump

__all__ = ["FileDivergenceSink"]


@attrs.frozen(kw_only=True)
class FileDivergenceSink:
    """Its ``write`` is the ``sink`` of a ``DecisionLog``: it writes one JSON file per dump and overwrites none.

    The names are ``decisions-rank<rank>-step<step>.json``, with the step that found the difference, so the files of
    all ranks of one divergence are found together. Decisions may contain ids of requests: only the owner of the
    process can read the files.

    Attributes:
        directory: where to write. It is made if it does not exist.
        max_files: files that this object writes at most; later dumps are dropped.
    """

    directory: Path
    max_files: int = 100
    _written: list[Path] = attrs.field(factory=list, init=False, repr=False)

    def write(self, dump: DecisionDump) -> None:
        """Write the dump.

        Raises:
            OSError: the file cannot be written.
        """
        if len(self._written) >= self.max_files:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"decisions-rank{dump.rank}-step{dump.report.found_at_step}"
        path = unused_path(self.directory, name, ".json")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(dump)))
        self._written.append(path)
