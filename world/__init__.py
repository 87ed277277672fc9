"""Time, disk, state, work and network are given to the code from outside.

`disk`, `store`, `clock` and `work` hold the protocols, `real` what production uses, `simulated` a whole machine room
on one seed. Only the real side imports uvloop, lmdb or threads.
"""
