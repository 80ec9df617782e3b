"""Files of dataset rows, read as in training."""
