"""What several packages of the kit share and nobody outside imports."""
