"""The names under which SkyRL's users import what lives in other rooms."""
