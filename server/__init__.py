"""A node: configuration, directories, assembly of its parts, life; and clusters of nodes on one machine."""
