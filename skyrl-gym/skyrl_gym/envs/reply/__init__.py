"""A single-reply environment without its own reward."""
