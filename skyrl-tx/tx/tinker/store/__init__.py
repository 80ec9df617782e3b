"""Server state: the database, checkpoint folders, retention and locks."""
