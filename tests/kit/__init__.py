"""Doubles, builders and fixtures that the tests share. `conftest.py` registers the fixtures."""
