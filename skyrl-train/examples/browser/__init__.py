"""Tasks on web pages, seen as screenshots."""
