"""Runs on a Ray cluster: ranks and the engine are actors. No other folder of `launch` imports ray."""
