"""Catch: a ball falls, a paddle moves, and the model plays with one letter per turn."""
