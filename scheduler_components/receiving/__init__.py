"""How requests reach every rank: relays of the input, and when a step skips receiving."""
