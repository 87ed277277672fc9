"""Logs on simulated machines and on real files."""
