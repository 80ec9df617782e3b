"""Engines that turn token ids into more token ids with their log-probs."""
