"""Cluster metadata: records, the image that they produce, the controller that decides, and the broker's tail of the
log."""
