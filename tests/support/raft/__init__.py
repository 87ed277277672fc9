"""Raft cores, members and their storage."""
