"""Question answering with a search engine and Python."""
