"""verl's command lines, keys and metrics."""
