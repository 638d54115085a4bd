"""Small parts that LLM-inference schedulers are composed of."""

from scheduler_components._version import __version__

__all__ = ["__version__"]
