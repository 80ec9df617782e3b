"""Rollouts: from prompts to trajectories."""
