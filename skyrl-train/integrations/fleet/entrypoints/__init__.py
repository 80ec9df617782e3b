"""Commands that train on Fleet tasks."""
