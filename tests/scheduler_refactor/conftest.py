"""The stages are written once for all tests and imported from their folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs" / "refactor"))

from stages import write_stages


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with all stages: the first one, and what each patch makes of the one before."""
    folder = tmp_path_factory.mktemp("stages")
    write_stages(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder
