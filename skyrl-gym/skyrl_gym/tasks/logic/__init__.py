"""The eight task types of LGC-v2."""
