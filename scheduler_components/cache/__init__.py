"""The reference cache: a radix tree of pages that records events from its own transitions."""
