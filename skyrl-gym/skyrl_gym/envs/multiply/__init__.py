"""Products of two numbers."""
