"""Multiply two numbers."""
