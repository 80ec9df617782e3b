"""Models at work: one worker per rank, and the group that the driver talks to."""
