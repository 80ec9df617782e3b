"""Conversations as text and tokens, for every kind of training: RL, SFT, preferences and the endpoint of agents."""
