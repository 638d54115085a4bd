"""The hierarchical cache: device, host and storage tiers that stay identical on every rank of a replica."""
