"""Ids, epochs, offsets and the error catalogue: the words that every room shares."""
