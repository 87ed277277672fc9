"""The world that production uses: files, LMDB, the system's clock, helper processes. Threads live here only."""
