"""Shared parts of the tests of skyrl-agent: import them with `from agent_kit.… import …`."""
