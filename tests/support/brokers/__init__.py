"""Brokers and replicas in the simulator."""
