"""Multiplication of two numbers."""
