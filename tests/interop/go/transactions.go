package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/IBM/sarama"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Records of a transaction; every third transaction is aborted, and its records are sent again in the next one.
const perTransaction = 10

// transact calls send for the numbers of each transaction, and then end. Each committed record is a JSON line.
func transact(count int, begin func(), send func(number int, aborted bool), end func(commit bool)) {
	for first, round := 0, 0; first < count; round++ {
		last := min(first+perTransaction, count)
		commit := round%3 != 2
		begin()
		for n := first; n < last; n++ {
			send(n, !commit)
			time.Sleep(pace)
		}
		end(commit)
		if commit {
			for n := first; n < last; n++ {
				emit(map[string]int{"value": n})
			}
			first = last
		}
	}
}

// Aborted records have negative values: no reader of committed records sees one.
func transactional(number int, aborted bool) []byte {
	if aborted {
		return value(-1 - number)
	}
	return value(number)
}

func franzTransactions(ctx context.Context, brokers []string, topic string, count int) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(brokers...),
		kgo.DefaultProduceTopic(topic),
		kgo.TransactionalID(topic+"-franz"),
		kgo.TransactionTimeout(30*time.Second),
	)
	check(err)
	defer client.Close()
	var waiting sync.WaitGroup
	transact(count, func() {
		check(client.BeginTransaction())
	}, func(n int, aborted bool) {
		waiting.Add(1)
		client.Produce(ctx, &kgo.Record{Key: key(n), Value: transactional(n, aborted)}, func(_ *kgo.Record, err error) {
			defer waiting.Done()
			check(err)
		})
	}, func(commit bool) {
		waiting.Wait()
		check(client.EndTransaction(ctx, kgo.TransactionEndTry(commit)))
	})
}

func saramaTransactions(_ context.Context, brokers []string, topic string, count int) {
	config := saramaConfig()
	config.Producer.Transaction.ID = topic + "-sarama"
	config.Producer.Transaction.Timeout = 30 * time.Second
	config.Producer.Transaction.Retry.Max = 100
	producer, err := sarama.NewSyncProducer(brokers, config)
	check(err)
	transact(count, func() {
		check(producer.BeginTxn())
	}, func(n int, aborted bool) {
		_, _, err := producer.SendMessage(&sarama.ProducerMessage{
			Topic: topic, Key: sarama.ByteEncoder(key(n)), Value: sarama.ByteEncoder(transactional(n, aborted)),
		})
		check(err)
	}, func(commit bool) {
		if commit {
			check(producer.CommitTxn())
		} else {
			check(producer.AbortTxn())
		}
	})
	check(producer.Close())
}

func runTransactions(ctx context.Context, name string, brokers []string, topic string, count int) {
	switch name {
	case "franz":
		franzTransactions(ctx, brokers, topic, count)
	case "sarama":
		saramaTransactions(ctx, brokers, topic, count)
	default:
		check(fmt.Errorf("%s has no transactions", name))
	}
}
