"""The commands that this package adds to ``scheduler-components``."""
