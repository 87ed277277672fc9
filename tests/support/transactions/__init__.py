"""Transactions: without a cluster, and in the simulator."""
