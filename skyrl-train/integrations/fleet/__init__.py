"""Training on environments that Fleet hosts, played through OpenEnv."""
