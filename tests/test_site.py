"""The site shows what users import, and loads nothing from outside. ``make docs`` builds it and runs this file."""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections import defaultdict
from enum import Enum
from pathlib import Path
from typing import Protocol, is_typeddict

import pytest
from kit.documents import REFERENCE, ROOT

from scheduler_components import RadixCache

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site in the folder ``$SITE``, else one that is built here as ``make docs`` does."""
    if built := os.environ.get("SITE"):
        return ROOT / built
    folder = tmp_path_factory.mktemp("site")
    config = ("--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(folder))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *config]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=250, env=quiet)
    assert ran.returncode == 0, ran.stderr
    return folder


def page_of(site: Path, package: str) -> str:
    """The built page of a package's names."""
    return (site / "reference" / REFERENCE[package].with_suffix(".html").name).read_text()


def test_a_page_shows_each_exported_name_once_and_nothing_else(site: Path) -> None:
    for package in sorted(REFERENCE):
        shown = re.findall(rf'id="{re.escape(package)}\.(\w+)"', page_of(site, package))
        exported = importlib.import_module(package).__all__
        expected = sorted(name for name in exported if f"{package}.{name}" not in REFERENCE)
        assert sorted(shown) == expected, package


def test_every_class_is_shown_with_the_parameters_that_it_takes(site: Path) -> None:
    """The fields of dataclasses, attrs classes, structs and models are parameters of their constructors."""
    for package in sorted(REFERENCE):
        page = page_of(site, package)
        for each in exported_classes(package):
            assert shown_parameters(page, f"{package}.{each.__name__}") == named_parameters(each), each


def entry_of(page: str, path: str) -> str:
    """Return the part of a reference page between the heading of one name and the next heading."""
    start = page.index(f' id="{path}"') + 1
    end = re.compile(r' id="(?:scheduler_components|observability)').search(page, start)
    return page[start : end.start() if end else None]


def shown_parameters(page: str, path: str) -> list[str]:
    """Return the parameters in the signature of a class, or none for a class without a constructor."""
    signature = re.search(r"doc-signature.*?<code>(.*?)</code>", entry_of(page, path), re.DOTALL)
    if signature is None:
        return []
    text = html.unescape(re.sub(r"<[^>]+>", "", signature[1])).strip()
    (function,) = ast.parse(f"def {text}: ...").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    return [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def exported_classes(package: str) -> list[type]:
    """Return the classes that users construct: no Protocol, no enum, no error with the parameters of every error."""
    module = importlib.import_module(package)
    found = (getattr(module, name) for name in module.__all__)
    classes = [each for each in found if isinstance(each, type) and not is_typeddict(each)]
    classes = [each for each in classes if not issubclass(each, Enum | Protocol)]
    return [each for each in classes if not issubclass(each, BaseException) or inspect.isfunction(each.__init__)]


def named_parameters(each: type) -> list[str]:
    parameters = inspect.signature(each).parameters.values()
    return [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def test_a_class_that_several_packages_export_is_described_in_one_place(site: Path) -> None:
    places: dict[type, list[str]] = defaultdict(list)
    for package in REFERENCE:
        for each in exported_classes(package):
            if "Described in" not in entry_of(page_of(site, package), f"{package}.{each.__name__}"):
                places[each].append(package)
    assert {each: packages for each, packages in places.items() if len(packages) != 1} == {}
    assert places[RadixCache] == ["scheduler_components.cache"]


def test_a_pipe_in_a_table_is_shown_without_its_escape(site: Path) -> None:
    assert "none|file|mooncake" in (site / "how-to" / "hierarchical-cache.html").read_text()


def test_flowcharts_are_drawn_while_the_site_is_built(site: Path) -> None:
    for page in ("index.html", "architecture.html"):
        text = (site / page).read_text()
        assert 'class="flowchart"' in text or "class=flowchart" in text
        assert "flowchart LR" not in text


def test_no_private_name_is_shown(site: Path) -> None:
    for page in site.glob("reference/*.html"):
        assert re.findall(r'id="[\w.]+\._(?!_)\w*"', page.read_text()) == [], page.name


def test_the_site_loads_nothing_from_outside(site: Path) -> None:
    pages, styles = list(site.rglob("*.html")), list(site.rglob("*.css"))
    assert pages
    assert styles
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(\w+://[^\s\">]+)", page.read_text())
        assert loaded == [], page.name
    for style in styles:
        assert not re.search(r"(?:url\(|@import)\s*[\"']?\w+://", style.read_text()), style.name


def test_the_page_for_a_missing_address_leads_to_pages_that_exist(site: Path) -> None:
    article = re.search(r"<article.*?</article>", (site / "404.html").read_text(), re.DOTALL)
    assert article
    links = re.findall(r"<a href=\"?(/[^\s\">]*)", article[0])
    assert len(links) >= 5
    assert [link for link in links if not (site / link.lstrip("/")).is_file()] == []
