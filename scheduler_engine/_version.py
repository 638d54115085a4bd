"""The version of this wheel: that of the kit, as a test checks."""

__version__ = "0.4.0"
"""The release that is installed."""
