"""What watches a scheduler: the log of allocations, statistics of pools, and the edges of watchdog and profiler."""
