"""Raft for one group, the `__cluster_metadata` log: a pure core, its storage, and the driver that gives it a world."""
