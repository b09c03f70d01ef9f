"""Ranks that talk: process groups and the one exchange. All collectives of the package. May import planning."""
