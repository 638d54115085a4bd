"""Run the command line with ``python -m scheduler_components``."""

from __future__ import annotations

from scheduler_components.reference.cli import main

if __name__ == "__main__":
    main.main()
