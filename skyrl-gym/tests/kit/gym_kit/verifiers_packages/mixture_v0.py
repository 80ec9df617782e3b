"""A group of two groups with an environment each, so that routes have two steps."""

import arithmetic_v0
import guessing_v0
import verifiers as vf


def load_environment() -> vf.Environment:
    sums = vf.EnvGroup([arithmetic_v0.load_environment()], env_names=["plain"])
    games = vf.EnvGroup([guessing_v0.load_environment()], env_names=["guessing"])
    return vf.EnvGroup([sums, games], env_names=["sums", "games"])
