"""Tools for tests of programs that use Tidelog: `LocalCluster` starts a real cluster of processes on this machine."""

from tidelog.testing.cluster import LocalCluster

__all__ = ["LocalCluster"]
