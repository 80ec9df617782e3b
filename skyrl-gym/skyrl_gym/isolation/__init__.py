"""Execution of untrusted programs, e.g. written by a model, in an isolated process."""

from skyrl_gym.isolation.program import (
    FunctionCall,
    ProgramLimits,
    ProgramResult,
    Stdin,
    isolation_level,
    run_once,
    run_program,
)

__all__ = ["FunctionCall", "ProgramLimits", "ProgramResult", "Stdin", "isolation_level", "run_once", "run_program"]
