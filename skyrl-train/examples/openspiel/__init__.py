"""OpenSpiel games."""
