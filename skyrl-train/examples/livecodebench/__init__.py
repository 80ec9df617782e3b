"""Programming tasks in the style of LiveCodeBench."""
