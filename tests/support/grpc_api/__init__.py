"""Nodes behind the gRPC API, and raw calls to it."""
