"""Games of OpenSpiel: one move at a time (`env`), and whole games (`game_env`)."""
