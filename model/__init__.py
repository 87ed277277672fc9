"""Ids, epochs, offsets and the error catalogue, shared by all packages."""
