"""Question answering with a search engine."""
