"""Acceptance of requests: validation, limits, and the database rows for the engine."""
