"""A stand-in for torchvision, which has no build for the CPU build of torch. SGLang imports it and does not use it.

``conftest.py`` puts this folder on the path where SGLang is installed.
"""

__version__ = "0.28.0"
