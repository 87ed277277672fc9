"""The HTTP server: metrics and health."""
