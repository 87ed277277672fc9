import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.TransactionState;
import org.apache.kafka.clients.consumer.Consumer;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.Producer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Transactional producers of Kafka's own client.
 *
 *   end BOOTSTRAP ID TOPIC        commits and aborts: "kept-0", "aborted-1", "kept-2", ...
 *   fence BOOTSTRAP ID TOPIC      prints the exception of the older one of two instances, at commit
 *   slow BOOTSTRAP ID TOPIC       prints the exception of a record after a timeout, commits another transaction, and
 *                                 prints the exception of a commit after a timeout
 *   open BOOTSTRAP ID TOPIC       begins one and leaves it open; ends when it is told to
 *   copy BOOTSTRAP ID GROUP PROTOCOL SOURCE TARGET   until it is told to end; prints a line for each commit
 */
public class Transactions {
    private static final Duration WAIT = Duration.ofSeconds(60);

    public static void main(String[] args) throws Exception {
        switch (args[0]) {
            case "end" -> end(args[1], args[2], args[3]);
            case "fence" -> fence(args[1], args[2], args[3]);
            case "slow" -> slow(args[1], args[2], args[3]);
            case "open" -> open(args[1], args[2], args[3]);
            case "copy" -> copy(args);
            default -> throw new IllegalArgumentException(args[0]);
        }
    }

    private static Producer<String, String> producer(String bootstrap, String id, int timeoutMs) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", bootstrap);
        settings.put("transactional.id", id);
        settings.put("transaction.timeout.ms", timeoutMs);
        settings.put("reconnect.backoff.max.ms", 500);
        Producer<String, String> made = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer());
        made.initTransactions();
        return made;
    }

    private static void end(String bootstrap, String id, String topic) throws Exception {
        try (Producer<String, String> producer = producer(bootstrap, id, 30_000)) {
            for (int number = 0; number < 9; number++) {
                boolean isKept = number % 3 != 1;
                producer.beginTransaction();
                for (int partition = 0; partition < 3; partition++) {
                    String value = (isKept ? "kept-" : "aborted-") + number;
                    producer.send(new ProducerRecord<>(topic, partition, null, value));
                }
                if (isKept) {
                    producer.commitTransaction();
                } else {
                    producer.flush();
                    producer.abortTransaction();
                }
            }
        }
    }

    private static String name(KafkaException error) {
        return error.getClass().getSimpleName();
    }

    private static void fence(String bootstrap, String id, String topic) throws Exception {
        Producer<String, String> old = producer(bootstrap, id, 30_000);
        old.beginTransaction();
        old.send(new ProducerRecord<>(topic, 0, null, "lost")).get();
        try (Producer<String, String> newer = producer(bootstrap, id, 30_000)) {
            try {
                old.commitTransaction();
                System.out.println("committed");
            } catch (KafkaException error) {
                System.out.println(name(error));
            }
            old.close();
            newer.beginTransaction();
            newer.send(new ProducerRecord<>(topic, 0, null, "kept"));
            newer.commitTransaction();
        }
    }

    private static void beginAndTimeOut(Producer<String, String> producer, Admin admin, String id, String topic)
            throws Exception {
        producer.beginTransaction();
        producer.send(new ProducerRecord<>(topic, 0, null, "lost")).get();
        long end = System.nanoTime() + WAIT.toNanos();
        while (admin.describeTransactions(Set.of(id)).description(id).get().state() != TransactionState.COMPLETE_ABORT) {
            if (System.nanoTime() > end) {
                throw new IllegalStateException("the transaction is not aborted");
            }
            Thread.sleep(100);
        }
    }

    private static void slow(String bootstrap, String id, String topic) throws Exception {
        try (Producer<String, String> producer = producer(bootstrap, id, 1_500);
             Admin admin = Admin.create(Map.of("bootstrap.servers", bootstrap))) {
            beginAndTimeOut(producer, admin, id, topic);
            try {
                producer.send(new ProducerRecord<>(topic, 1, null, "late")).get();
                System.out.println("sent");
            } catch (ExecutionException error) {
                System.out.println(error.getCause().getClass().getSimpleName());
            }
            producer.abortTransaction();
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(topic, 0, null, "kept")).get();
            producer.commitTransaction();
            beginAndTimeOut(producer, admin, id, topic);
            try {
                producer.commitTransaction();
                System.out.println("committed");
            } catch (KafkaException error) {
                System.out.println(name(error));
            }
        }
    }

    private static void open(String bootstrap, String id, String topic) throws Exception {
        Producer<String, String> producer = producer(bootstrap, id, 600_000);
        producer.beginTransaction();
        producer.send(new ProducerRecord<>(topic, 0, null, "open")).get();
        System.out.println("open");
        Thread.sleep(Long.MAX_VALUE);
    }

    private static void copy(String[] args) throws Exception {
        String source = args[5];
        String target = args[6];
        Properties settings = new Properties();
        settings.put("bootstrap.servers", args[1]);
        settings.put("group.id", args[3]);
        settings.put("group.protocol", args[4]);
        settings.put("isolation.level", "read_committed");
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", "false");
        settings.put("max.poll.records", "10");
        settings.put("reconnect.backoff.max.ms", 500);
        Consumer<String, String> consumer =
            new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer());
        consumer.subscribe(List.of(source));
        Producer<String, String> producer = producer(args[1], args[2], 30_000);
        while (true) {
            Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
            var records = consumer.poll(Duration.ofMillis(200));
            if (records.isEmpty()) {
                continue;
            }
            try {
                producer.beginTransaction();
                for (ConsumerRecord<String, String> record : records) {
                    producer.send(new ProducerRecord<>(target, record.partition(), record.key(), record.value()));
                    offsets.put(
                        new TopicPartition(record.topic(), record.partition()),
                        new OffsetAndMetadata(record.offset() + 1));
                }
                producer.sendOffsetsToTransaction(offsets, consumer.groupMetadata());
                producer.commitTransaction();
                System.out.println("committed " + records.count());
            } catch (KafkaException error) {
                System.out.println("aborts after " + error);
                producer.abortTransaction();
                consumer.committed(consumer.assignment()).forEach((partition, committed) ->
                    consumer.seek(partition, committed == null ? 0 : committed.offset()));
            }
        }
    }
}
