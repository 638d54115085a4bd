"""One rank's process: its loop, its edges and what computes for it."""
