"""The state of a server: the database, checkpoint folders, retention and locks."""
