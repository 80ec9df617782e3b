"""Named benchmarks: their rows, their scores with confidence intervals, and models behind an API that play them.

`skyrl eval` evaluates checkpoints, `skyrl-gym eval` models behind an API.
"""
