"""Shared parts of the tests of veritas-rl: import them with `from veritas_kit.… import …`."""
