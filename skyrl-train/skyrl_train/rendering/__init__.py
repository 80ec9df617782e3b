"""Render conversations as text and tokens, for RL, SFT, preferences and the agents' endpoint."""
