"""The environment that code gets from outside: time, disk, state store, CPU work, network.

`disk`, `store`, `clock`, `work` and `transport` define the protocols, `real` implements them for production,
`simulated` on one seed. Only `real` imports uvloop, lmdb or threads.
"""
