package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// The API server counts requests by flow schema (KEP-1040), not by user: a
// schema of its own makes a user's countable. Events have another one, as they
// are not counted.
const (
	flowRequests = "bench-mcm"
	flowEvents   = "bench-mcm-events"
)

// benchRequests reads from the API server's own counters what a machine costs.
func benchRequests(ctx context.Context, b *bench) error {
	w, err := b.newWorld(ctx)
	if err != nil {
		return err
	}
	const machines = 20
	var running, gone []float64
	table := [][]string{{"round", "to Running", "from there to gone"}}
	for round := range b.rounds {
		var counts [3]int
		names := machineNames(machines, fmt.Sprintf("requests-%d", round))
		steps := []func() error{
			func() error { return nil },
			func() error { return w.createMachines(ctx, names) },
			func() error { return w.deleteMachines(ctx, names) },
		}
		for i, step := range steps {
			if err := step(); err != nil {
				return errors.Join(err, w.close())
			}
			if counts[i], err = w.requests(ctx); err != nil {
				return errors.Join(err, w.close())
			}
		}
		running = append(running, float64(counts[1]-counts[0])/machines)
		gone = append(gone, float64(counts[2]-counts[1])/machines)
		table = append(table, []string{
			strconv.Itoa(round + 1), fmt.Sprintf("%.2f", running[round]), fmt.Sprintf("%.2f", gone[round]),
		})
	}
	b.table(table...)
	b.atMost("requests-to-running", median(running), 10)
	b.atMost("requests-to-gone", median(gone), 14)
	return w.close()
}

// countRequests makes the API server count mcm's requests separately, without Events.
func (w *world) countRequests(ctx context.Context) error {
	all := []string{flowcontrolv1.ResourceAll}
	for name, rule := range map[string]struct {
		precedence int32 // the lower one is tried first
		groups     []string
		resources  []string
	}{
		flowEvents:   {800, []string{"", "events.k8s.io"}, []string{"events"}},
		flowRequests: {900, all, all},
	} {
		err := w.kube.Create(ctx, &flowcontrolv1.FlowSchema{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: flowcontrolv1.FlowSchemaSpec{
				PriorityLevelConfiguration: flowcontrolv1.PriorityLevelConfigurationReference{Name: "workload-high"},
				MatchingPrecedence:         rule.precedence,
				Rules: []flowcontrolv1.PolicyRulesWithSubjects{{
					Subjects: []flowcontrolv1.Subject{{Kind: flowcontrolv1.SubjectKindUser, User: &flowcontrolv1.UserSubject{Name: user}}},
					ResourceRules: []flowcontrolv1.ResourcePolicyRule{{
						Verbs: all, APIGroups: rule.groups, Resources: rule.resources, Namespaces: all, ClusterScope: true,
					}},
				}},
			},
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// counted returns how many there were so far.
func (w *world) counted(ctx context.Context) (int, error) {
	metrics, err := w.metrics(ctx)
	if err != nil {
		return 0, err
	}
	return dispatched(metrics)
}

// metrics are the API server's.
func (w *world) metrics(ctx context.Context) (string, error) {
	cfg, err := clientcmd.BuildConfigFromFlags("", w.cluster.Kubeconfig)
	if err != nil {
		return "", err
	}
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return "", err
	}
	metrics, err := client.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	return string(metrics), err
}

// requests returns how many there were, once no more come.
func (w *world) requests(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not within %s", patience))
	defer cancel()
	last, since := -1, time.Now()
	const still = 2 * time.Second
	err := stack.Poll(ctx, "mcm makes no more requests", func(ctx context.Context) error {
		count, err := w.counted(ctx)
		if err != nil {
			return err
		}
		if count != last {
			last, since = count, time.Now()
		}
		if time.Since(since) < still {
			return fmt.Errorf("the last of %d was less than %s ago", count, still)
		}
		return nil
	})
	return last, err
}

// dispatched reads the counter of mcm's requests.
func dispatched(metrics string) (int, error) {
	for line := range strings.Lines(metrics) {
		series, value, ok := strings.Cut(strings.TrimSpace(line), "} ")
		if !ok || !strings.HasPrefix(series, "apiserver_flowcontrol_dispatched_requests_total{") ||
			!strings.Contains(series, `flow_schema="`+flowRequests+`"`) {
			continue
		}
		count, err := strconv.ParseFloat(value, 64)
		return int(count), err
	}
	return 0, nil // the counter comes with the first request
}
