"""Agents: loops of model calls and tool calls."""
