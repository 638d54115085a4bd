"""Where it begins: one object in five files, and a context that all of them reach for."""
