"""Write the table of names in ``docs/upgrading.md`` from the table by which old names work.

Run ``python docs/make_upgrading.py``. A test fails when the page differs from the table.
"""

from __future__ import annotations

import re
from pathlib import Path

from scheduler_components._internal.old_name_table import OLD_NAMES, REMOVED_NAMES

PAGE = Path(__file__).parent / "upgrading.md"


def with_names(page: str) -> str:
    """Return ``page`` with the table between its marks."""
    rows = "".join(f"| `{old}` | `{new}` |\n" for old, new in OLD_NAMES.items())
    removed = "".join(f"| `{name}` | {instead} |\n" for name, instead in REMOVED_NAMES.items())
    table = f"| 0.4 | 0.5 |\n| --- | --- |\n{rows}\n| removed from 0.4 | instead |\n| --- | --- |\n{removed}"
    return re.sub(r"(<!-- names -->\n).*?(<!-- end -->)", rf"\1\n{table}\n\2", page, flags=re.DOTALL)


def main() -> None:
    PAGE.write_text(with_names(PAGE.read_text()))


if __name__ == "__main__":
    main()
