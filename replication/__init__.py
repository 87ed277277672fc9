"""Replicates partitions: leader and follower replicas, in-sync sets, high watermarks."""
