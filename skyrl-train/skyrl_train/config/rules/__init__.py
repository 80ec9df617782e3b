"""Rules of the configuration, which `config.validation` lists: each yields a sentence per problem."""
