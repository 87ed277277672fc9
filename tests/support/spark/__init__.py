"""What tests need of Spark."""
