"""SkyRL's classes and functions, as adapters of this project's own."""
