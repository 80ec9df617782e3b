"""SkyRL-train: reinforcement learning for language-model agents."""

from skyrl_train.compat.skyrl import names

names.install()
