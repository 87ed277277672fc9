"""Kafka clients of others."""
