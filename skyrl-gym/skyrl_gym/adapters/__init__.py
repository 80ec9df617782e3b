"""Adapters of other ecosystems' environments to `BaseTextEnv`. Each depends only on the package it is named after."""
