"""The example scheduler of one rank, composed of the kit's components."""
