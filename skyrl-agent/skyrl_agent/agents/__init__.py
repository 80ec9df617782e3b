"""Agents: loops that let a model act with tools."""
