"""Adapters for other frameworks' names, files and command lines. The rest of the package never imports them."""
