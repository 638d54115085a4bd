"""Golden bytes as data files; ``vectors`` reads them."""
