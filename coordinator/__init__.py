"""Consumer groups: who reads which partitions, and how far they have come."""
