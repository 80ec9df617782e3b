"""A stand-in for the package `envs.fleet_env` of Fleet's OpenEnv, without Fleet's servers."""
