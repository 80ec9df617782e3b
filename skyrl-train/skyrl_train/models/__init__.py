"""Models and tokenizers, log-probs and values."""
