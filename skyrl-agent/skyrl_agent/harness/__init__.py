"""Harnesses: agents that are programs, each in a workspace of its own, trained through the endpoint."""
