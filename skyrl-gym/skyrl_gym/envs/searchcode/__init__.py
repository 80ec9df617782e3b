"""Questions that are answered with the help of a search engine and of Python."""
