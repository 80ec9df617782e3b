"""The HTTP application: the service shared by all routes, API keys, request bodies, replies, logs and metrics."""
