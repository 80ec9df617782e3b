"""Instructions that a program can verify, as in IFEval."""
