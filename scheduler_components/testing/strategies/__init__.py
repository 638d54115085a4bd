"""Hypothesis strategies. They need the extra ``testing``."""
