"""Output: what leaves a scheduler for its clients."""
