"""Datasets of prompts, demonstrations and preferences, and the batches built from them."""
