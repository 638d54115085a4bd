"""Write ``docs/code-map.md`` from the first sentence of each module's docstring: ``python docs/make_code_map.py``.

A test fails when the page differs from the code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "code-map.md"
PACKAGES = ("scheduler_components", "observability")
HEAD = """# Code map

Every file with its subject, generated from the first sentence of its docstring by `make generated`. Files that begin
with `zmq_`, `torch_`, `thread_`, `file_`, `http_`, `prometheus_`, `mooncake_`, `shm_` or `nats_` do I/O. All other
files are pure. [Architecture](../ARCHITECTURE.md) says how the files work together.
"""


def render_code_map() -> str:
    """Return the text of the page."""
    sections = [section for package in PACKAGES for section in _sections(ROOT / package)]
    return "\n".join([HEAD, *sections])


def _sections(folder: Path) -> Iterator[str]:
    """Yield one section for a package and one for each package below it."""
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    if files:
        rows = "".join(f"| `{path.name}` | {_summary(path)} |\n" for path in files)
        title, subject = f"`{folder.relative_to(ROOT)}/`", _summary(folder / "__init__.py")
        yield f"## {title}\n\n{subject}\n\n| file | subject |\n| --- | --- |\n{rows}"
    for inner in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        yield from _sections(inner)


def _summary(path: Path) -> str:
    """Return the first sentence of a module's docstring, as Markdown."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0]
    return re.sub(r"``(.+?)``", r"`\1`", sentence).replace("|", r"\|")


def main() -> None:
    PAGE.write_text(render_code_map())


if __name__ == "__main__":
    main()
