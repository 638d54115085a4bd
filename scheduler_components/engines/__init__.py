"""Plugins that install this kit's publisher in other engines.

The package exports nothing. An engine loads its plugin by the entry point, and an operator enables it by an environment
variable (``settings.py``). Importing this package imports no engine.
"""
