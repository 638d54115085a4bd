"""The version of the kit. The other wheels of this repository have the same one."""

__version__ = "0.4.0"
"""The release that is installed."""
