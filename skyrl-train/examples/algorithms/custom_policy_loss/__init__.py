"""A custom policy loss."""
