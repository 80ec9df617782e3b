"""`skyrl watch`: a run in a browser or on a terminal, while it lives."""
