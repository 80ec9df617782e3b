"""`skyrl_train.utils` under another name that SkyRL's scripts import."""
