"""Programming tasks, in the manner of LiveCodeBench."""
