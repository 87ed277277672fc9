"""Raft for one group, the `__cluster_metadata` log: a pure core, its storage, its driver, and the state machine
runtime."""
