"""Self-play in OpenSpiel games against a frozen copy of the policy."""
