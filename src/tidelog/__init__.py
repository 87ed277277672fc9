"""Tidelog: a streaming log cluster."""

__version__ = "0.1.0"
