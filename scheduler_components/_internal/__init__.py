"""Code that several packages of the kit share. It is not public."""
