"""Names that SGLang imports from ``torchvision.transforms``. They are never called."""

from __future__ import annotations

from enum import Enum


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return object
