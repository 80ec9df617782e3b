"""Modules that SkyRL's scripts import."""
