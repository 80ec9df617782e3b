"""Catch from pixels: the model sees the board as an image."""
