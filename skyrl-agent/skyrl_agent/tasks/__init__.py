"""Tasks: what agents have to do, where they work, and how their results are graded."""
