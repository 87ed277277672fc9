"""The transaction coordinator: pure decisions over a partition of `__transaction_state`, and their shards. Pure."""
