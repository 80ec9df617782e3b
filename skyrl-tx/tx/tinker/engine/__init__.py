"""The process that owns the backend: it takes requests from the database, computes, and writes what came of them."""
