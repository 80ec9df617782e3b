"""Inputs for the functions of other packages, which only the environment of `make test-differential` has."""
