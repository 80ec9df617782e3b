"""A single-reply environment without a reward."""
