"""Tile database: tuned dense tiles with their measured costs and their provenance."""
