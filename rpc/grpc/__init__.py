"""The gRPC API: `tidelog.v1` for clients, and the transport between nodes."""
