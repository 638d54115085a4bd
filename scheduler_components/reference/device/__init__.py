"""The simulated device, traces and workloads."""
