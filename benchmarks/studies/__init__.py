"""Studies: comparisons over whole traces, run by hand. Their results are on pages of the documentation."""
