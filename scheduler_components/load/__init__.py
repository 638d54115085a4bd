"""Load: what a replica says of itself, and how it is counted."""
