"""Agents: loops in which a model acts with tools."""
