// kafkajs behind a command line, for tests/interop/test_node_clients.py:
//
//   node client.js produce BOOTSTRAP TOPIC COUNT
//   node client.js consume BOOTSTRAP TOPIC GROUP COUNT
//   node client.js reset-offsets BOOTSTRAP TOPIC GROUP
//   node client.js transact BOOTSTRAP TOPIC COUNT
//
// Each acknowledged and each consumed record is one JSON line on stdout. A record's value is its number.
const { createRequire } = require('node:module')
const path = require('node:path')
const { Kafka, logLevel } = createRequire(path.join(process.env.INTEROP_NODE_MODULES, 'index.js'))('kafkajs')

const PACE_MS = 4
const KEYS = 30
const emit = (row) => process.stdout.write(JSON.stringify(row) + '\n')
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

async function produce(kafka, topic, count) {
  // Not its idempotent producer: see "Bugs of clients" in docs/kafka.md.
  const producer = kafka.producer()
  await producer.connect()
  const sends = []
  for (let number = 0; number < count; number++) {
    const message = { key: `key-${number % KEYS}`, value: String(number) }
    sends.push(
      producer.send({ topic, acks: -1, messages: [message] }).then(([ack]) => {
        emit({ value: number, partition: ack.partition, offset: Number(ack.baseOffset) })
      })
    )
    await pause(PACE_MS)
  }
  await Promise.all(sends)
  await producer.disconnect()
}

// Every third transaction is aborted, with negative values, and its records are sent again in the next one.
async function transact(kafka, topic, count) {
  const producer = kafka.producer({
    transactionalId: `${topic}-kafkajs`,
    idempotent: true,
    maxInFlightRequests: 1,
    transactionTimeout: 30000,
  })
  await producer.connect()
  for (let first = 0, round = 0; first < count; round++) {
    const last = Math.min(first + 10, count)
    const isCommit = round % 3 !== 2
    const transaction = await producer.transaction()
    for (let number = first; number < last; number++) {
      const message = { key: `key-${number % KEYS}`, value: String(isCommit ? number : -1 - number) }
      await transaction.send({ topic, acks: -1, messages: [message] })
      await pause(PACE_MS)
    }
    await (isCommit ? transaction.commit() : transaction.abort())
    if (!isCommit) continue
    for (let number = first; number < last; number++) emit({ value: number })
    first = last
  }
  await producer.disconnect()
}

async function consume(kafka, topic, groupId, count) {
  const consumer = kafka.consumer({ groupId, sessionTimeout: 10000, maxWaitTimeInMs: 200, retry: { retries: 100 } })
  await consumer.connect()
  await consumer.subscribe({ topics: [topic], fromBeginning: true })
  const seen = new Set()
  await new Promise((resolve, reject) => {
    consumer.on(consumer.events.CRASH, ({ payload }) => payload.restart || reject(payload.error))
    consumer.run({
      eachMessage: async ({ partition, message }) => {
        const value = Number(message.value.toString())
        emit({ value, partition, offset: Number(message.offset) })
        seen.add(value)
        if (seen.size >= count) resolve()
      },
    }).catch(reject)
  })
  await consumer.disconnect()
}

async function resetOffsets(kafka, topic, groupId) {
  const admin = kafka.admin()
  await admin.connect()
  // It commits -1 (latest) or -2 (earliest), and the broker stores that.
  await admin.resetOffsets({ groupId, topic, earliest: true })
  const [found] = await admin.fetchOffsets({ groupId, topics: [topic] })
  for (const { partition, offset } of found.partitions) emit({ partition, offset: Number(offset) })
  await admin.disconnect()
}

async function main() {
  const [verb, bootstrap, topic, ...rest] = process.argv.slice(2)
  const kafka = new Kafka({
    clientId: 'interop',
    brokers: bootstrap.split(','),
    logLevel: logLevel.ERROR,
    retry: { retries: 100, maxRetryTime: 1000 },
  })
  if (verb === 'produce') await produce(kafka, topic, Number(rest[0]))
  else if (verb === 'transact') await transact(kafka, topic, Number(rest[0]))
  else if (verb === 'consume') await consume(kafka, topic, rest[0], Number(rest[1]))
  else if (verb === 'reset-offsets') await resetOffsets(kafka, topic, rest[0])
  else throw new Error(`unknown verb ${verb}`)
}

main().then(
  () => process.exit(0),
  (error) => {
    console.error('interop:', error)
    process.exit(1)
  }
)
