"""Nodes behind the Kafka API, and requests to it."""
