"""A checker of components in anyone's code: it reads the source, and never imports it."""
