"""Competition maths: DAPO's training set, and AIME 2024 for validation."""
