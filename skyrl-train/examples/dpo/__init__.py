"""Teach a model to prefer answers to refusals."""
