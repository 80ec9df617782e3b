"""One worker per rank of a model, and the group through which the driver calls them."""
