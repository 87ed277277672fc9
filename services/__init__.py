"""The service layer: what clients may ask of a node, free of any wire format."""
