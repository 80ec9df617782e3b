"""Questions to answer with a search engine."""
