"""Uses the asyncio clients: one task produces, one consumes.

python examples/asyncio_example.py [HOST:PORT]
"""

import asyncio
import sys

import tidelog
from tidelog import aio

BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else "localhost:9292"
TOPIC = "example-events"
COUNT = 50


async def write() -> None:
    async with aio.Producer(BOOTSTRAP, linger_ms=2) as producer:
        deliveries = [await producer.send(TOPIC, f"event {number}", key=f"{number % 5}") for number in range(COUNT)]
        for delivery in deliveries:
            await delivery
    print(f"wrote {COUNT} events")


async def read() -> None:
    seen = 0
    async with aio.Consumer(BOOTSTRAP, group="example-listeners", auto_offset_reset="earliest") as consumer:
        await consumer.subscribe([TOPIC])
        async for _ in consumer:
            seen += 1
            if seen == COUNT:
                break
        await consumer.commit()
    print(f"read {seen} events")


async def main() -> None:
    async with aio.Admin(BOOTSTRAP) as admin:
        await admin.create_topics([tidelog.NewTopic(TOPIC, partitions=2)], if_not_exists=True)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        tasks.create_task(write())


if __name__ == "__main__":
    asyncio.run(main())
