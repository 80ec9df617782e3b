"""Fleet without its servers: task lists, and a stand-in for its package OpenEnv."""
