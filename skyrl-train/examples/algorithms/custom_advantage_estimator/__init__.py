"""A custom advantage estimator."""
