"""Acceptance of requests: validation, limits, and the database rows that the engine works off."""
