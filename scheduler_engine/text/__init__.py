"""Tokenize prompts and detokenize outputs. Only the serving process imports this package, no rank does."""
