"""Competition maths, as in DAPO."""
