"""Run simulated worlds: ``make worlds WORLDS='--seeds 1000'``."""

from __future__ import annotations

import sys

from worlds.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
