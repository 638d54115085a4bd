"""Plugins that put this kit's publisher into engines that somebody else wrote: one file per engine.

Nothing is exported: an engine finds its plugin by its entry point, and an operator asks for it by an environment
variable (``settings.py``). Importing this package imports no engine.
"""
