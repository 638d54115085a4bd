"""The stages are imported by name from their own folder, as ``docs/refactor/run.py`` does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent.parent / "docs" / "refactor"))
