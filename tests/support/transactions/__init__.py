"""Transactions without a cluster."""
