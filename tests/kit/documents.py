"""Where the documents are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
REFERENCE = {
    module: path
    for path in sorted((ROOT / "docs" / "reference").glob("*.md"))
    for module in re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE)
}
"""Each package or module that users import from, and the page that shows its names."""
