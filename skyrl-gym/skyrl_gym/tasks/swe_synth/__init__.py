"""Synthetic bugs in a small Python library, to be fixed with a unified diff."""
