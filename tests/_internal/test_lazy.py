"""Names of a package that are imported on their first use."""

from __future__ import annotations

import sys

import pytest

from scheduler_components._internal.lazy import lazy_exports

GET = lazy_exports("json", {"json.decoder": "JSONDecoder JSONDecodeError", "json.tool": "tool"})


def test_a_name_is_imported_from_its_module_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "json.tool", raising=False)
    assert GET("JSONDecoder").__module__ == "json.decoder"
    assert "json.tool" not in sys.modules
    assert GET("tool").__name__ == "json.tool", "a module's own name gives the module"


def test_another_name_is_an_attribute_error_of_the_package() -> None:
    with pytest.raises(AttributeError, match=r"^module 'json' has no attribute 'YAMLDecoder'$"):
        GET("YAMLDecoder")
