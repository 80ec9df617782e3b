"""Command lines, keys and metrics of verl."""
