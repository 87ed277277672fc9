"""Bounded exhaustive exploration of the pure cores: every order of a few events, every loss, every crash.

`explorer` visits the states of a model, `toy` shows on a protocol with a known bug that it finds what there is to find,
`raft_model`, `partition_model` and `transaction_model` are the cores of production. `python -m exploration` is the long
campaign (`make explore`); docs/testing.md says what it proves and what not.
"""
