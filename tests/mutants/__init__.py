"""Mutation testing: small defects, put into the product one at a time, which a seed or a test has to notice.

    make mutants MODULE=log.durability SAMPLE=20

edits.py        what is an edit; which statements and functions are never edited
operators.py    the mutation operators, over the syntax tree
finder.py       all mutants of a module; the source of one
blocks.py       probes that record which blocks of a module run
hook.py         imports a module with a mutant or with probes; no file changes
table.py        modules.toml: which stacks and tests cover which modules
equivalents.py  equivalent.toml: mutants that change nothing that anybody could notice
reach.py        which seed and which test reaches which block; measured once, kept in build/mutants
worker.py       a process that measures, or that runs seeds or tests against one mutant
seed_runs.py    its seeds
pytest_runs.py  its tests
runner.py       plans and starts the workers
results.py      build/mutants.jsonl, the table, the summary

This package imports nothing of the product before a worker has installed its import hook.
"""
