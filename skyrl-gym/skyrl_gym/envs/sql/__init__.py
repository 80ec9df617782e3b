"""Questions to answer with a SQL query."""
