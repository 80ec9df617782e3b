"""Integrations with services outside this project."""
