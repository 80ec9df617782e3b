"""A module that SkyRL's scripts import. Its names are in `skyrl_train.compat.skyrl.names`."""
