"""The API servers of a node (gRPC, Kafka, HTTP), and the gRPC transport between nodes."""
