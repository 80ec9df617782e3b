"""Creation of ranks, engines and weight syncs from a configuration."""
