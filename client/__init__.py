"""The client's core: connections, metadata and routing, an idempotent writer, a reader, the admin's calls.

asyncio only, no threads; connections, clock and randomness are given, so that it runs in the simulator as it is. What
users touch (`tidelog.Producer` and its kin) is built on it.
"""
