"""Retrieval server for a file of documents: `python -m skyrl_gym.retrieval --corpus wiki.jsonl`."""
