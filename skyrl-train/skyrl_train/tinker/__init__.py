"""Training with a Tinker service. The service holds the model. Needs the package `tinker`."""
