"""Tasks: what agents are asked to do, where they work, and how their results are graded."""
