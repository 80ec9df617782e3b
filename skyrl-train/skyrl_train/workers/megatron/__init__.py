"""Workers under the names that SkyRL's scripts import."""
