"""Workers hold a model and do the heavy steps: scoring log-probs and updating weights."""
