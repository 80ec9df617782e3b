"""GSM8K: grade-school maths."""
