"""What the commands print."""

from __future__ import annotations

import sys
from collections.abc import Iterable


def print_lines(lines: Iterable[str]) -> None:
    """Write lines to standard output unchanged, for commands whose output other programs read."""
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()
