"""A policy loss of your own."""
