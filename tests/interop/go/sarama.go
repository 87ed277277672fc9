package main

import (
	"context"
	"sync"
	"time"

	"github.com/IBM/sarama"
)

type saramaClient struct{}

func saramaConfig() *sarama.Config {
	config := sarama.NewConfig()
	config.Version = sarama.V3_6_0_0
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Producer.Return.Successes = true
	config.Producer.Idempotent = true
	config.Producer.Retry.Max = 100
	config.Producer.Retry.Backoff = 200 * time.Millisecond
	config.Net.MaxOpenRequests = 1
	config.Metadata.Retry.Max = 100
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Group.Rebalance.Retry.Max = 100
	return config
}

func (saramaClient) produce(ctx context.Context, brokers []string, topic string, count int) {
	producer, err := sarama.NewAsyncProducer(brokers, saramaConfig())
	check(err)
	var waiting sync.WaitGroup
	waiting.Add(1)
	go func() {
		defer waiting.Done()
		for done := 0; done < count; done++ {
			select {
			case message := <-producer.Successes():
				encoded, err := message.Value.Encode()
				check(err)
				emit(row{number(encoded), message.Partition, message.Offset})
			case failure := <-producer.Errors():
				check(failure.Err)
			case <-ctx.Done():
				return
			}
		}
	}()
	for n := 0; n < count; n++ {
		producer.Input() <- &sarama.ProducerMessage{
			Topic: topic, Key: sarama.ByteEncoder(key(n)), Value: sarama.ByteEncoder(value(n)),
		}
		time.Sleep(pace)
	}
	waiting.Wait()
	check(producer.Close())
}

type saramaHandler struct {
	lock sync.Mutex
	seen *seen
	stop context.CancelFunc
}

func (*saramaHandler) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (*saramaHandler) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (h *saramaHandler) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for message := range claim.Messages() {
		session.MarkMessage(message, "")
		h.lock.Lock()
		if h.seen.add(row{number(message.Value), message.Partition, message.Offset}) {
			session.Commit()
			h.stop()
		}
		h.lock.Unlock()
	}
	return nil
}

func (saramaClient) consume(ctx context.Context, brokers []string, topic, group string, s *seen) {
	consumer, err := sarama.NewConsumerGroup(brokers, group, saramaConfig())
	check(err)
	session, stop := context.WithCancel(ctx)
	defer stop()
	handler := &saramaHandler{seen: s, stop: stop}
	for session.Err() == nil {
		// An error of one session (a coordinator that was killed) ends that session; the next call joins again.
		if err := consumer.Consume(session, []string{topic}, handler); err != nil {
			time.Sleep(200 * time.Millisecond)
		}
	}
	// It has read everything; the coordinator that it would leave may have moved.
	_ = consumer.Close()
}
