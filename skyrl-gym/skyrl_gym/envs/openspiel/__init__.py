"""OpenSpiel games: single moves (`env`) and whole games (`game_env`)."""
