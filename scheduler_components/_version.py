"""The one place the version is written."""

__version__ = "0.4.0"
"""The release that is installed."""
