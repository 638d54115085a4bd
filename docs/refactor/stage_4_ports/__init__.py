"""Step 4: callables and whole objects become ports, and gates become null objects."""
