"""Training on Fleet's hosted environments, through OpenEnv."""
