"""Questions that are answered with a SQL query."""
