"""Runs on a Ray cluster: ranks and engines are actors. Nothing else in `launch` imports ray."""
