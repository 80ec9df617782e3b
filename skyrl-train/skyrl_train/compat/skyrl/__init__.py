"""SkyRL's classes and functions, implemented as adapters of ours."""
