"""Shared parts of the tests of skyrl-tx: import them with `from tx_kit.… import …`."""
