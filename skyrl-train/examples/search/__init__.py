"""Questions that are answered with a search engine, as in Search-R1."""
