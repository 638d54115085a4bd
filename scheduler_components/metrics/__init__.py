"""Metrics: the values of one step, and rates over recent ones."""
