"""Shared parts of the tests of skyrl-train: import them with `from train_kit.… import …`."""
