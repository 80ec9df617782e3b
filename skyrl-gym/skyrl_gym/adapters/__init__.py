"""Adapters that turn other ecosystems' environments into `BaseTextEnv`. Each needs only its own package."""
