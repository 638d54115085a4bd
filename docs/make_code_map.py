"""Write ``docs/code-map.md`` from module docstrings, and the layers of ARCHITECTURE.md from ``tests/test_layers.py``.

Run ``python docs/make_code_map.py``. A test fails when a page differs from the code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "code-map.md"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
PACKAGES = ("scheduler_components", "observability", "scheduler_engine", "scheduler_refactor")
HEAD = """# Code map

Every file with its subject, generated from the first sentence of its docstring by `make generated`. Files whose
names begin with `zmq_`, `torch_`, `thread_`, `file_`, `http_`, `prometheus_`, `mooncake_`, `shm_`, `nats_` or `otel_`
do I/O. [Architecture](../ARCHITECTURE.md) says how the files work together.
"""


def render_code_map() -> str:
    """Return the text of the page."""
    sections = [section for package in PACKAGES for section in _sections(ROOT / package)]
    return "\n".join([HEAD, *sections])


def with_layers(page: str) -> str:
    """Return ``page`` with the layers between its marks, the highest first."""
    picture = "\n".join("  ".join(layer) for layer in reversed(read_layers()))
    return re.sub(r"(<!-- layers -->\n).*?(<!-- end -->)", rf"\1\n```text\n{picture}\n```\n\n\2", page, flags=re.DOTALL)


def read_layers() -> tuple[tuple[str, ...], ...]:
    """Return ``FLOORS`` of ``tests/test_layers.py``, the lowest first."""
    for node in ast.parse((ROOT / "tests" / "test_layers.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "FLOORS":
            return tuple(ast.literal_eval(node.value))
    raise ValueError("tests/test_layers.py has no FLOORS")


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
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text[: text.index('"""', 3) + 3])) or ""  # parsing all of it takes long
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0]
    return re.sub(r"``(.+?)``", r"`\1`", sentence).replace("|", r"\|")


def main() -> None:
    PAGE.write_text(render_code_map())
    ARCHITECTURE.write_text(with_layers(ARCHITECTURE.read_text()))


if __name__ == "__main__":
    main()
