"""The Kafka door: Kafka's own protocol, over the services that the gRPC doors call."""
