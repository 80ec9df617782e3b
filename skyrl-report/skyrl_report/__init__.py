"""Look at runs: metrics, trajectories, reports and comparisons. Needs neither PyTorch nor the trainer."""
