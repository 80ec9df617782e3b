"""Rules of the configuration. Each yields a sentence per problem. `config.validation` lists them."""
