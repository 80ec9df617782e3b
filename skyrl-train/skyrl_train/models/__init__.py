"""Loading models and tokenizers, and the log-probs of chosen tokens."""
