"""The command `tx`."""
