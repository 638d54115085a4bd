"""Hypothesis state machines to subclass. They need the extra ``testing``."""
