"""Replicated partitions: who leads, who follows, what is in sync, and what a client may read."""
