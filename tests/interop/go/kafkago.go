package main

import (
	"context"
	"errors"
	"time"

	"github.com/segmentio/kafka-go"
)

type kafkaGo struct{}

// produce writes one record at a time: this client reports no offsets, and has no idempotent producer.
func (kafkaGo) produce(ctx context.Context, brokers []string, topic string, count int) {
	writer := &kafka.Writer{
		Addr: kafka.TCP(brokers...), Topic: topic, RequiredAcks: kafka.RequireAll, BatchSize: 1,
		Balancer: kafka.Murmur2Balancer{}, MaxAttempts: 50, WriteBackoffMax: 500 * time.Millisecond,
	}
	defer func() { check(writer.Close()) }()
	for n := 0; n < count; n++ {
		for {
			err := writer.WriteMessages(ctx, kafka.Message{Key: key(n), Value: value(n)})
			if err == nil {
				break
			}
			check(ctx.Err())
			time.Sleep(200 * time.Millisecond)
		}
		emit(row{n, -1, -1})
		time.Sleep(pace)
	}
}

func (kafkaGo) consume(ctx context.Context, brokers []string, topic, group string, s *seen) {
	reader := kafka.NewReader(kafka.ReaderConfig{
		Brokers: brokers, Topic: topic, GroupID: group, StartOffset: kafka.FirstOffset, MaxWait: 200 * time.Millisecond,
	})
	defer func() { check(reader.Close()) }()
	for {
		message, err := reader.FetchMessage(ctx)
		if errors.Is(err, context.DeadlineExceeded) {
			check(err)
		}
		if err != nil {
			time.Sleep(200 * time.Millisecond)
			continue
		}
		if s.add(row{number(message.Value), int32(message.Partition), message.Offset}) {
			check(reader.CommitMessages(ctx, message))
			return
		}
	}
}
