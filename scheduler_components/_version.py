"""The one place the version is written."""

__version__ = "0.3.0"
"""The release that is installed."""
