"""Chaos runs: real nodes, real clients, random faults, and checkers of what the clients saw.

    target     what a run strikes: the addresses of a cluster, and its faults
    commands   a target that is a cluster of yours: faults are commands of a TOML file
    plan       the faults of a run, drawn from a seed
    nemesis    carries them out
    workers    the clients, a process each, with their histories
    judge      the verdict on the histories
    report     the same as one HTML file
    run        all of it, from the first record to the verdict

`tidelog verify chaos` runs it on a cluster of yours; `make chaos` of the sources on one that it makes.
"""
