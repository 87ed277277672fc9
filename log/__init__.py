"""One partition's log, and all the logs of a node: batches, segments, indexes, recovery, retention, compaction."""
