"""The command line ``scheduler-components``; ``main`` is its entry point."""
