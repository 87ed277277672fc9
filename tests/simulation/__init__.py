"""A whole cluster in one process, on one seed: programs on machines, faults, checks, and an exact replay.

cluster.py      machines, what runs on them, who starts it again
nemesis.py      a plan of faults, drawn from the seed, and how each is done and undone
more_faults.py  rot under running nodes, faults of observers
checkers.py     what must hold after every step
workload.py     clients, and whether their answers are linearizable
core_node.py    a Raft node: the core in a lean shell, on a modelled disk
model_disk.py   that disk
driver_node.py  a Raft node: driver, storage and log as in production, on the simulated disk
observers.py    who tails a group without voting, and what must hold of what it is given
raft_sim.py     one run: seed in, verdict out
defects.py      deliberate defects that the simulator has to notice
broker_sim.py   one run of a whole cluster; broker_shape, broker_node, broker_workload, compacted_reads,
                broker_operator, broker_checker, broker_faults, broker_defects; product_shape, product_operator,
                product_workload, product_checker and product_defects have more of the product
groups_sim.py   one run around consumer groups; consumer_groups, groups_workload, groups_checker and groups_faults serve
                runs of `broker_sim` too
coverage.py     which faults struck which features on which roles; broker_coverage has those of a whole cluster
campaign.py     many seeds in parallel, and the shrinking of a plan that fails
"""
