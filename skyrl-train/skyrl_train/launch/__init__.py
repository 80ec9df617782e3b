"""From a configuration to ranks, engines and weight sync."""
