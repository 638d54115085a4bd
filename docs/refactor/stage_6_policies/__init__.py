"""A scheduler; ``scheduler.py`` opens it."""
