"""Shared parts of the tests of skyrl-gym: import them with `from gym_kit.… import …`."""
