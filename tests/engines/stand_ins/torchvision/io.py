"""Names that SGLang imports from ``torchvision.io``. They are never called."""

from __future__ import annotations

from enum import Enum


class ImageReadMode(Enum):
    RGB = "RGB"
    UNCHANGED = "UNCHANGED"


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: object, **__: object) -> None:
        raise NotImplementedError(f"the stand-in for torchvision has no {name}")

    return absent
