"""An advantage estimator of your own."""
