"""Synthetic bugs in a small Python library, to be repaired by a unified diff."""
