"""Grade-school maths: word problems with a number as the answer."""
