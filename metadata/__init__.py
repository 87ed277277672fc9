"""The cluster's metadata: records, the image they make, the controller that decides, the broker's tail of it."""
