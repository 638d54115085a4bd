"""Writes ``docs/reference/`` from the docstrings of the public modules: ``python docs/make_reference.py``.

The modules listed here are the public API that ``docs/stability.md`` speaks of. Sources are read and never imported,
so that no extra need be installed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
MAX_WIDTH = 110
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):")
ITEM = re.compile(r"([A-Za-z_*][\w*]*(?:, [A-Za-z_*][\w*]*)*): (.*)", re.DOTALL)


@dataclass(frozen=True)
class Page:
    """One page: its file's stem, its title, and its modules below ``prefix``; ``*`` stands for all of them."""

    stem: str
    title: str
    prefix: str
    modules: str

    def sources(self) -> Iterator[tuple[str, Path]]:
        """Give each module's name and file."""
        folder = ROOT / self.prefix.replace(".", "/")
        for name in self.modules.split():
            pattern = f"{name.replace('.', '/')}.py" if name != "*" else "**/*.py"
            for path in sorted(folder.glob(pattern)):
                if path.stem not in ("__init__", "__main__") or name == "__init__":
                    parts = (*path.relative_to(ROOT).with_suffix("").parts,)
                    yield ".".join(parts).removesuffix(".__init__"), path


PAGES = (
    Page(
        "components", "Components and ports", "scheduler_components",
        "__init__ ports request_ports parallel_state kv_events_publisher load_inquirer load_publisher metrics_emitter"
        " output_streamer output.delta output.held_ends batch_result_processor finish server_info errors failure_log",
    ),
    Page(
        "kv-events", "KV events", "scheduler_components.kv_events",
        "__init__ events publisher config registry endpoint port_plan codec zmq_publisher zmq_access zmq_keys"
        " event_stream replay_wire",
    ),
    Page(
        "load-and-metrics", "Load and metrics", "scheduler_components",
        "load.snapshot load.token_counted_queue load.gauge_pacer load.work_totals load.dispatch_ledger load.load_stat"
        " load.load_view load.zmq_load_sink load.zmq_load_reader load.shm_load_board metrics.stats metrics.rolling"
        " metrics.histogram metrics.request_times metrics.request_latencies metrics.kv_metrics_wire"
        " metrics.zmq_kv_metrics_sink metrics.shm_metrics_board",
    ),
    Page("cache", "Cache", "scheduler_components.cache", "radix_cache namespace block_hash page_pool"),
    Page(
        "hicache", "Hierarchical cache", "scheduler_components.hicache",
        "hi_radix_cache preparations policy tiers tier_stats tier_stepper operations sync proposal sync_call rank_sets"
        " in_process_sync thread_sync torch_groups keys storage memory_storage file_storage mooncake_storage"
        " thread_storage host_pool page_memory",
    ),
    Page(
        "observability", "Observability", "observability",
        "catalog output_catalog metric prometheus_sink prometheus_board prometheus_outputs log_sink http_app watch"
        " doctor finding kv_stream.discovery kv_stream.zmq_subscriber kv_stream.follower kv_stream.listener"
        " kv_stream.stats kv_stream.view kv_stream.cursor kv_stream.instructions",
    ),
    Page("testing", "Test kit", "scheduler_components.testing", "*"),
)  # fmt: skip


def render() -> dict[str, str]:
    """Return the text of every page by file name, the index among them."""
    pages = {f"{page.stem}.md": _page(page) for page in PAGES}
    rows = "".join(f"| [{page.title}]({page.stem}.md) | {_names_of(page)} |\n" for page in PAGES)
    pages["README.md"] = f"{_head('Reference')}| page | modules |\n| --- | --- |\n{rows}"
    return pages


def _head(title: str) -> str:
    return f"# {title}\n\n<!-- Written by docs/make_reference.py from the docstrings: change those. -->\n\n"


def _names_of(page: Page) -> str:
    return ", ".join(f"`{name}`" for name, _ in page.sources())


def _page(page: Page) -> str:
    return _head(page.title) + "\n".join(_module(name, ast.parse(path.read_text())) for name, path in page.sources())


def _module(name: str, tree: ast.Module) -> str:
    public = _public_names(tree)
    defined = {node: text for node, text in _definitions(tree) if node in public}
    text = f"## `{name}`\n\n{to_markdown(ast.get_docstring(tree) or '')}\n\n"
    elsewhere = [each for each in public if each not in defined]
    if elsewhere:
        text += f"Also exports {', '.join(f'`{each}`' for each in elsewhere)}.\n\n"
    return text + "\n".join(defined[each] for each in public if each in defined)


def _public_names(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _definitions(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Give each name that the module itself defines, with its rendered text."""
    for node, after in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.ClassDef):
            yield node.name, _class(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, f"### `{node.name}`\n\n{_code(_signature(node))}\n{_doc(node)}\n"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name):
                yield target.id, _constant(target.id, node, after)


def _constant(name: str, node: ast.Assign | ast.AnnAssign, after: ast.stmt) -> str:
    is_documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    doc = to_markdown(textwrap.dedent(str(after.value.value))) if is_documented else ""  # type: ignore[attr-defined]
    source = ast.unparse(node)
    shown = source if len(source) <= MAX_WIDTH else f"{source.partition(' = ')[0]} = ..."
    return f"### `{name}`\n\n{_code(shown)}\n{doc}\n"


def _class(node: ast.ClassDef) -> str:
    bases = [ast.unparse(base) for base in node.bases]
    lines = [f"class {node.name}({', '.join(bases)})" if bases else f"class {node.name}"]
    lines += [f"    {line}" for line in _fields(node)]
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    init = next((method for method in methods if method.name == "__init__"), None)
    if init is not None:
        lines += textwrap.indent(_signature(init), "    ").splitlines()
    listed = [_method(method) for method in methods if not method.name.startswith("_")]
    return f"### `{node.name}`\n\n{_code(chr(10).join(lines))}\n{_doc(node)}\n" + "".join(listed)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """The public fields, and members of an enum, as they stand in the source."""
    is_enum = any("Enum" in ast.unparse(base) for base in node.bases)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_"):
            yield _field(ast.unparse(item))
        elif isinstance(item, ast.Assign) and is_enum:
            yield ast.unparse(item)


def _field(source: str) -> str:
    """A field with its default; without the validators of attrs, dataclasses and pydantic."""
    declared, given, value = source.partition(" = ")
    if not given or "field(" not in value.lower():
        return source
    if "init=False" in value:
        return f"{declared}  # not given, but kept by the object"
    default = re.search(r"default=([^,)]+)", value)
    if default:
        return f"{declared} = {default[1]}"
    return declared if "factory" not in value else f"{declared} = ..."


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    names = {ast.unparse(decorator) for decorator in node.decorator_list}
    if names & {"property", "cached_property"}:
        head = f"{node.name}: {ast.unparse(node.returns)}" if node.returns else node.name
    else:
        head = "".join(f"@{name} " for name in sorted(names & {"classmethod", "staticmethod"}))
        head += _signature(node, max_width=10_000)
    doc = textwrap.indent(_doc(node).strip(), "  ").strip()
    return f"- `{head}`\n" + (f"\n  {doc}\n\n" if doc else "\n")


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, *, max_width: int = MAX_WIDTH) -> str:
    """The call on one line, or with a line for each parameter where that would be too wide."""
    parameters = list(_parameters(node.args))
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    name = f"async {node.name}" if isinstance(node, ast.AsyncFunctionDef) else node.name
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) <= max_width:
        return line
    wrapped = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{name}(\n{wrapped}){returns}"


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    """Each parameter as one would write it, without self."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for at, (parameter, default) in enumerate(zip(positional, defaults, strict=True), start=1):
        if at > 1 or parameter.arg not in ("self", "cls"):
            yield _parameter(parameter, default)
        if at == len(arguments.posonlyargs) > 1:
            yield "/"
    if arguments.vararg:
        yield f"*{_parameter(arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(parameter, default)
    if arguments.kwarg:
        yield f"**{_parameter(arguments.kwarg, None)}"


def _parameter(parameter: ast.arg, default: ast.expr | None) -> str:
    declared = f"{parameter.arg}: {ast.unparse(parameter.annotation)}" if parameter.annotation else parameter.arg
    return declared if default is None else f"{declared} = {ast.unparse(default)}"


def _code(text: str) -> str:
    return f"```py\n{text}\n```\n"


def _doc(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    return to_markdown(ast.get_docstring(node) or "") + "\n"


def to_markdown(docstring: str) -> str:
    """Turn one of the kit's docstrings, sections of items and all, into Markdown."""
    out: list[str] = []
    section: list[str] = []
    for line in [*docstring.replace("``", "`").splitlines(), "end"]:
        if section and line and not line.startswith(" "):
            out += _section(section)
            section = []
        if SECTION.fullmatch(line) or section:
            section.append(line)
        else:
            out.append(line)
    return "\n".join(out[:-1]).strip()


def _section(lines: list[str]) -> list[str]:
    """Render ``Args:`` and what is indented below it."""
    items: list[str] = []
    for line in textwrap.dedent("\n".join(lines[1:])).strip().splitlines():
        if line.startswith(" ") and items:
            items[-1] += f" {line.strip()}"
        elif line:
            items.append(line)
    found = [ITEM.fullmatch(item) for item in items]
    if not all(found):
        return [f"**{lines[0].rstrip(':')}:** {' '.join(items)}", ""]
    listed = [f"- `{item[1]}`: {item[2]}" for item in found if item]
    return [f"**{lines[0].rstrip(':')}:**", "", *listed, ""]


def main() -> None:
    """Write every page, and remove what is no page any more."""
    REFERENCE.mkdir(exist_ok=True)
    pages = render()
    for name, text in pages.items():
        (REFERENCE / name).write_text(text)
    for path in REFERENCE.glob("*.md"):
        if path.name not in pages:
            path.unlink()


if __name__ == "__main__":
    main()
