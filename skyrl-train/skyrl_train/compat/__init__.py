"""Everything that exists only for the names, files and command lines of other frameworks. Nothing else imports it."""
