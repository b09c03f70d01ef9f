"""Communication between hosts: process groups, discovery of connected ranks, and the vote that shares errors."""
