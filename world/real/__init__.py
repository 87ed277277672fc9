"""The environment of production: files, LMDB, the system clock, helper processes. Threads exist only here."""
