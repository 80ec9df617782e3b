"""Launches with SkyPilot."""
