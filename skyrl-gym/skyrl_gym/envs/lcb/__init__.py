"""Programming tasks, as in LiveCodeBench."""
