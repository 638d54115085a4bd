"""Judging a live engine's stream against the wire's rules: ``examine`` does all of it, ``stream_judge`` is its core."""
