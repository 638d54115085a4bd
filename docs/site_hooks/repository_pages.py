"""Add files of the repository outside ``docs/`` to the site, so that one relative link works in both.

``README.md`` and similar files become pages. A file or folder of code that a page links to becomes a page that shows
it. Links are rewritten while a page is rendered, and no file is copied. MkDocs loads this module as a hook.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent.parent
DOCS = "docs/"
SOURCES = "source/"
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""File of the repository -> page of the site, for pages with another name."""

FENCED = re.compile(r"^(```+).*?^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[#)])")
CODE_WITH_PIPE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
SHOWN_AS_THEY_ARE = {".md", ".svg", ".png"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add these pages, and a page for each file of code that a page links to."""
    index = files.get_file_from_path("README.md")
    if index is not None:
        files.remove(index)
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    sources = {target for file in files.documentation_pages() for target in _sources(file)}
    for path in sorted(sources):
        shown = File.generated(config, _source_page(path), content=_show(path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(shown)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite each link to a file of the repository into a link to its page."""
    del config, files
    if page.file.src_uri.startswith(SOURCES):
        return markdown  # generated above, with links of the site
    here = posixpath.dirname(page.file.src_uri)
    origin = _origin(page.file.src_uri)

    def to_page(match: re.Match[str]) -> str:
        target = _target(origin, match[0])
        return match[0] if target is None else posixpath.relpath(_page_of(target), here or ".")

    return _outside_fences(markdown, lambda text: LINK.sub(to_page, _plain_pipes(text)))


def _plain_pipes(text: str) -> str:
    r"""Replace ``\|`` by ``|`` in code: a forge needs the escape in a table, Python-Markdown shows it."""
    return CODE_WITH_PIPE.sub(lambda code: code[0].replace(r"\|", "|"), text)


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Apply ``change`` to the text between blocks of code."""
    out, at = "", 0
    for block in FENCED.finditer(markdown):
        out += change(markdown[at : block.start()]) + block[0]
        at = block.end()
    return out + change(markdown[at:])


def _origin(page: str) -> str:
    """Return the file of the repository that a page of the site shows."""
    return next((path for path, name in PAGES.items() if name == page), DOCS + page)


def _target(origin: str, link: str) -> str | None:
    """Return the file of the repository that a link names, or None for a URL."""
    if ":" in link:
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def _page_of(path: str) -> str:
    """Return the page of the site that shows a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith(DOCS) and posixpath.splitext(path)[1] in SHOWN_AS_THEY_ARE:
        return path.removeprefix(DOCS)
    return _source_page(path)


def _source_page(path: str) -> str:
    return f"{SOURCES}{path}.md"


def _sources(file: File) -> Iterator[str]:
    """Yield the files and folders of code that a page links to, and the files in these folders."""
    origin = _origin(file.src_uri)
    for link in LINK.findall(FENCED.sub("", file.content_string)):
        path = _target(origin, link)
        if path is not None and _page_of(path) == _source_page(path):
            yield path
            yield from (f"{path}/{name}" for name in _listed(path))


def _listed(path: str) -> list[str]:
    return sorted(each.name for each in (ROOT / path).glob("[!_]*") if each.is_file())


def _show(path: str) -> str:
    """Return the page of one file, or of a folder with links to its files."""
    head = f"---\ntitle: {posixpath.basename(path)}\nsearch: {{ exclude: true }}\n---\n\n# `{path}`\n\n"
    if (ROOT / path).is_dir():
        return head + "".join(f"- [`{name}`]({posixpath.basename(path)}/{name}.md)\n" for name in _listed(path))
    if not (ROOT / path).is_file():
        raise PluginError(f"a page links to {path}, which is not in the repository")
    language = {".py": "py", ".patch": "diff"}.get(posixpath.splitext(path)[1], posixpath.splitext(path)[1].lstrip("."))
    return f"{head}````{language}\n{(ROOT / path).read_text()}\n````\n"
