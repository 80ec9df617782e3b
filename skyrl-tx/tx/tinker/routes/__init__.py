"""The endpoints, in groups."""
