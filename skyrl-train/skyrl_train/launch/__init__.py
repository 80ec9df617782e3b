"""Creation of ranks, engines and weight sync from a configuration."""
