"""The `tx` command."""
