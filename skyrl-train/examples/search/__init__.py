"""Questions to be answered with a search engine, as in Search-R1."""
