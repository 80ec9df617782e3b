"""Teach a model to count, from demonstrations."""
