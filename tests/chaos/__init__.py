"""Chaos runs: real nodes, real clients, random faults, and checkers of what the clients saw. See `chaos.__main__`."""
