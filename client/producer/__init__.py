"""The producer: an asyncio core, its asyncio API and its threaded API."""
