"""Check and play an environment without a trainer: `skyrl env check` and `skyrl env play`."""
