"""Competition maths, in the manner of DAPO."""
