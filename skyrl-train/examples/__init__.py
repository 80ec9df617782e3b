"""Complete training runs, each in a folder with its own README."""
