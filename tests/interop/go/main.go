// Kafka clients of the Go world behind one command line, for tests/interop/test_go_clients.py:
//
//	interop franz|sarama|kafka-go produce BOOTSTRAP TOPIC COUNT
//	interop franz|sarama|kafka-go consume BOOTSTRAP TOPIC GROUP COUNT
//	interop franz|sarama transact BOOTSTRAP TOPIC COUNT
//	interop kadm groups BOOTSTRAP
//
// Each acknowledged and each consumed record is one JSON line on stdout. A record's value is its number.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	pace     = 4 * time.Millisecond
	deadline = 150 * time.Second
	keys     = 30
)

type row struct {
	Value     int   `json:"value"`
	Partition int32 `json:"partition"`
	Offset    int64 `json:"offset"`
}

var (
	outLock sync.Mutex
	out     = bufio.NewWriter(os.Stdout)
)

func emit(document any) {
	outLock.Lock()
	defer outLock.Unlock()
	line, err := json.Marshal(document)
	check(err)
	_, err = out.Write(append(line, '\n'))
	check(err)
	check(out.Flush())
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "interop:", err)
		os.Exit(1)
	}
}

func key(number int) []byte { return []byte(fmt.Sprintf("key-%d", number%keys)) }

func value(number int) []byte { return []byte(strconv.Itoa(number)) }

func number(value []byte) int {
	found, err := strconv.Atoi(string(value))
	check(err)
	return found
}

// seen counts distinct values, so that a redelivery after a rebalance does not end a consumer early.
type seen struct {
	values map[int]bool
	want   int
}

func (s *seen) add(r row) bool {
	emit(r)
	s.values[r.Value] = true
	return len(s.values) >= s.want
}

type client interface {
	produce(ctx context.Context, brokers []string, topic string, count int)
	consume(ctx context.Context, brokers []string, topic, group string, s *seen)
}

func main() {
	if len(os.Args) < 4 {
		check(fmt.Errorf("usage: interop CLIENT produce|consume|groups BOOTSTRAP ..."))
	}
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	name, verb, brokers := os.Args[1], os.Args[2], strings.Split(os.Args[3], ",")
	if name == "kadm" && verb == "groups" {
		describeGroups(ctx, brokers)
		return
	}
	clients := map[string]client{"franz": franz{}, "sarama": saramaClient{}, "kafka-go": kafkaGo{}}
	chosen, known := clients[name]
	if !known {
		check(fmt.Errorf("unknown client %q", name))
	}
	count, err := strconv.Atoi(os.Args[len(os.Args)-1])
	check(err)
	switch verb {
	case "transact":
		runTransactions(ctx, name, brokers, os.Args[4], count)
	case "produce":
		chosen.produce(ctx, brokers, os.Args[4], count)
	case "consume":
		chosen.consume(ctx, brokers, os.Args[4], os.Args[5], &seen{values: map[int]bool{}, want: count})
	default:
		check(fmt.Errorf("unknown verb %q", verb))
	}
	check(ctx.Err())
}
