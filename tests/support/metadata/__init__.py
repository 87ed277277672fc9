"""Controllers with and without a network."""
