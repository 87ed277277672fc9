"""The doors of a node: what speaks gRPC or the Kafka protocol to the outside, and the gRPC transport inside."""
