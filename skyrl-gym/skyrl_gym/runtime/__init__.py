"""Building blocks for programs that run environments: method calls, validation, configuration, and a worker process."""
