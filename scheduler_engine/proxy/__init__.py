"""An HTTP proxy in front of several engines, which sends each request to the replica that has most of its prompt."""
