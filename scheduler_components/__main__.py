"""``python -m scheduler_components``: the command line, where its script is not on the path."""

from __future__ import annotations

from scheduler_components.reference.cli import main

if __name__ == "__main__":
    main.main()
