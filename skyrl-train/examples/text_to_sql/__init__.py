"""Questions to be answered with a SQL query."""
