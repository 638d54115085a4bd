"""The names of ``torchvision.transforms.functional`` of this stand-in."""

from torchvision.transforms.functional import InterpolationMode, __getattr__

__all__ = ["InterpolationMode", "__getattr__"]
