"""SkyRL-train: reinforcement learning for language-model agents."""
