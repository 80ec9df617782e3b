"""Question answering with a search engine, as in Search-R1."""
