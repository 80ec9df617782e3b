"""Grade-school maths: word problems whose answer is a number."""
