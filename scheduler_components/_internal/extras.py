"""The optional libraries: the extra that installs each, and the error that names the extra when one is missing."""

from __future__ import annotations

from importlib.util import find_spec
from types import TracebackType

from scheduler_components.errors import MissingExtraError

__all__ = ["EXTRA_OF", "naming_extras", "require_modules"]

EXTRA_OF = {
    "prometheus_client": "metrics",
    "h11": "http",
    "httpx": "http",
    "starlette": "http",
    "uvicorn": "http",
    "cyclopts": "engine",
    "prompt_toolkit": "engine",
    "rich": "engine",
    "numpy": "hicache",
    "matplotlib": "plot",
    "torch": "torch",
    "accelerate": "model",
    "gguf": "model",
    "tokenizers": "model",
    "transformers": "model",
    "llguidance": "grammar",
    "mooncake": "mooncake",
    "nats": "jetstream",
    "opentelemetry": "otel",
    "hypothesis": "testing",
    "libcst": "refactor",
}
"""Importable module -> the extra of this package that installs it. A test compares it with ``pyproject.toml``."""


class _NamingExtras:
    """A ``with`` block around imports. The error of a missing library names the extra that installs it."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if type(error) is ModuleNotFoundError and error.name is not None:
            module = error.name.partition(".")[0]
            if module in EXTRA_OF:
                raise MissingExtraError(module, EXTRA_OF[module]) from None


naming_extras = _NamingExtras()
"""``with naming_extras: import torch`` raises ``MissingExtraError`` where torch is not installed."""


def require_modules(*modules: str, otherwise: str = "") -> None:
    """Check that optional libraries are installed, without importing them.

    Args:
        modules: names of ``EXTRA_OF``.
        otherwise: what else the user can do, as a clause for the hint.

    Raises:
        MissingExtraError: one of them is not installed.
    """
    for module in modules:
        if find_spec(module) is None:
            raise MissingExtraError(module, EXTRA_OF[module], otherwise)
