package main

import (
	"context"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

type franz struct{}

func (franz) produce(ctx context.Context, brokers []string, topic string, count int) {
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.DefaultProduceTopic(topic), kgo.RequiredAcks(kgo.AllISRAcks()))
	check(err)
	defer client.Close()
	var waiting sync.WaitGroup
	for n := 0; n < count; n++ {
		waiting.Add(1)
		client.Produce(ctx, &kgo.Record{Key: key(n), Value: value(n)}, func(r *kgo.Record, err error) {
			defer waiting.Done()
			check(err)
			emit(row{number(r.Value), r.Partition, r.Offset})
		})
		time.Sleep(pace)
	}
	waiting.Wait()
}

func (franz) consume(ctx context.Context, brokers []string, topic, group string, s *seen) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(brokers...),
		kgo.ConsumerGroup(group),
		kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.DisableAutoCommit(),
	)
	check(err)
	defer client.Close()
	for done := false; !done && ctx.Err() == nil; {
		fetches := client.PollFetches(ctx)
		fetches.EachRecord(func(r *kgo.Record) {
			done = s.add(row{number(r.Value), r.Partition, r.Offset}) || done
		})
	}
	check(client.CommitUncommittedOffsets(ctx))
}

// describeGroups does what a lag exporter does: it lists all groups, then describes them and their offsets at once.
func describeGroups(ctx context.Context, brokers []string) {
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	check(err)
	defer client.Close()
	lags, err := kadm.NewClient(client).Lag(ctx)
	check(err)
	check(lags.Error())
	for _, lag := range lags.Sorted() {
		emit(map[string]any{"group": lag.Group, "state": lag.State, "lag": lag.Lag.Total()})
	}
}
