"""Adapters for the names, files and command lines of other frameworks. The rest of the package never imports them."""
