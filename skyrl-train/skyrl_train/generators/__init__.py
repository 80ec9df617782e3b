"""From prompts to trajectories."""
