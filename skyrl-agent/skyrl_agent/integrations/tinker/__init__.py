"""Training with a Tinker service, which holds the model. Needs the package `tinker`."""
