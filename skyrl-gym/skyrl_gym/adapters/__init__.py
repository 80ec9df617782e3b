"""Environments of other ecosystems as `BaseTextEnv`. Each module needs the package it is named after, and no other."""
