"""The Kafka API: Kafka's wire protocol over the services."""
