"""One reply without a reward of its own."""
