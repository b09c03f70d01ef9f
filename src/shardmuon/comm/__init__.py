"""Communication between ranks: process groups, discovery of connected ranks, and votes in which ranks report errors."""
