package e2e

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus/chaos"
	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// truthTimeout is that of each operation here.
	truthTimeout = 15 * time.Second
	// acceptBy is how old a request may be when a replica takes it, by the contract.
	acceptBy = 2 * time.Second
)

// TestStatusTellsTheTruth takes replicas and leading managers away in the middle of
// creates and deletes, and then holds what was to be seen of each Machine, at any time,
// against the cloud's log: it has not contradicted it for longer than one operation may
// take. Where nothing identifies a create, what a lost one has made is looked for once
// that could make nothing any more, and so may show later by this.
func TestStatusTellsTheTruth(t *testing.T) {
	t.Parallel()
	for identity, shown := range map[string]time.Duration{
		"token": truthTimeout, "unique_name": truthTimeout, "none": truthTimeout + acceptBy + truthTimeout,
	} {
		t.Run(identity, func(t *testing.T) { newEnv(t).tellsTheTruth(identity, shown) })
	}
}

func (e *env) tellsTheTruth(identity string, shown time.Duration) {
	m, tap := e.startManagers("--machine-operation-timeout=" + truthTimeout.String())
	drivers, links := e.startLinkedDrivers(3, m.nats, tap, "--identity="+identity)
	e.createClass()
	seen := e.watchMachines()
	names := e.createMachines(1, className)
	e.waitRunning(names...) // so the first manager leads before there is another
	m.standBy()

	latency, effect := cloudapi.Duration(2*time.Second), cloudapi.EffectEnd
	_, err := e.cloud.Admin.Patch(e.ctx(), cloudapi.KnobsPatch{CreateLatency: &latency, DeleteLatency: &latency, CreateEffect: &effect})
	e.must(err)
	const machines = 12
	for i := range machines {
		names = append(names, fmt.Sprintf("%s-%02d", e.name, i))
		e.createMachine(names[len(names)-1], className)
	}
	lost := e.waitWorking(tap, drivers, create, 2)
	links[lost[0]].Cut()
	e.must(lost[1].Kill())
	m.failOver()
	e.waitRunning(names...)
	links[lost[0]].Mend()

	for _, name := range names {
		e.deleteMachine(name)
	}
	victim := e.waitWorking(tap, drivers, destroy, 1)[0]
	e.must(victim.Kill())
	m.failOver()
	e.waitGone(names...)
	seen.awaitGone(e, len(names))

	log, err := e.cloud.Admin.Log(e.ctx(), 0)
	e.must(err)
	for _, what := range contradictions(seen.all(), log, truthTimeout, shown, time.Now()) {
		e.Error(what)
	}
}

// startLinkedDrivers starts n replicas, each behind a link of its own.
func (e *env) startLinkedDrivers(n int, natsURL string, tap *stack.Tap, args ...string) ([]*stack.Driver, map[*stack.Driver]*chaos.Link) {
	e.Helper()
	drivers, links := []*stack.Driver{}, map[*stack.Driver]*chaos.Link{}
	for i := range n {
		link, err := chaos.OpenLink(e.ctx(), strings.TrimPrefix(natsURL, "nats://"))
		e.must(err)
		e.atEnd = append(e.atEnd, link.Close)
		d, err := e.site.StartDriver(e.ctx(), tap, stack.DriverOptions{
			Name: fmt.Sprintf("driver-virtual-%d", i+1), NATSURL: "nats://" + link.Address(), Clusters: []string{e.name}, Args: args,
		})
		e.must(err)
		drivers, links[d] = append(drivers, d), link
	}
	return drivers, links
}

// waitWorking waits until n of the drivers list running operations of a kind, and
// returns those.
func (e *env) waitWorking(tap *stack.Tap, drivers []*stack.Driver, op driverv1.Operation, n int) (working []*stack.Driver) {
	e.Helper()
	e.eventually(fmt.Sprintf("%d replicas are at it", n), func(context.Context) error {
		working = nil
		for _, d := range drivers {
			if len(tap.Running(d.Replica, op)) > 0 {
				working = append(working, d)
			}
		}
		if len(working) < n {
			return fmt.Errorf("%d are", len(working))
		}
		return nil
	})
	return working
}

// A sighting is what was to be seen of a Machine from some moment on.
type sighting struct {
	at         time.Time
	uid        string
	name       string
	phase      v1alpha1.MachinePhase
	providerID string
	leaving    bool // it is being deleted
	gone       bool
}

// A watcher notes all that is to be seen of Machines. It is safe for concurrent use.
type watcher struct {
	mu        sync.Mutex
	sightings []sighting
}

// watchMachines watches the env's Machines until the test ends.
func (e *env) watchMachines() *watcher {
	e.Helper()
	kube, err := stack.NewClient(e.cluster.Kubeconfig)
	e.must(err)
	ctx, stop := context.WithCancel(e.ctx())
	events, err := kube.Watch(ctx, &v1alpha1.MachineList{}, client.InNamespace(e.name))
	e.must(err)
	w := &watcher{}
	var work sync.WaitGroup
	work.Go(func() {
		for event := range events.ResultChan() {
			w.note(event)
		}
	})
	e.atEnd = append(e.atEnd, func() {
		stop()
		events.Stop()
		work.Wait()
	})
	return w
}

func (w *watcher) note(event watch.Event) {
	m, ok := event.Object.(*v1alpha1.Machine)
	if !ok {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sightings = append(w.sightings, sighting{
		at: time.Now(), uid: string(m.UID), name: m.Name, phase: m.Status.CurrentStatus.Phase, providerID: m.Spec.ProviderID,
		leaving: m.DeletionTimestamp != nil, gone: event.Type == watch.Deleted,
	})
}

func (w *watcher) all() []sighting {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]sighting{}, w.sightings...)
}

// awaitGone waits until the watch has shown the end of n machines.
func (w *watcher) awaitGone(e *env, n int) {
	e.Helper()
	e.eventually("the watch has shown all ends", func(context.Context) error {
		gone := 0
		for _, s := range w.all() {
			if s.gone {
				gone++
			}
		}
		if gone < n {
			return fmt.Errorf("of %d of %d", gone, n)
		}
		return nil
	})
}

// A life is that of an instance, by the cloud's log.
type life struct {
	id, uid     string
	made, ended time.Time // zero for not yet
}

func livesOf(log []cloudapi.LogEntry) map[string]*life {
	lives := map[string]*life{}
	for _, entry := range log {
		switch {
		case entry.Op == cloudapi.OpCreate && entry.Event == cloudapi.EventCreated:
			lives[entry.ID] = &life{id: entry.ID, uid: entry.MachineUID, made: entry.Time}
		case entry.Event == cloudapi.EventDeleted && lives[entry.ID] != nil:
			lives[entry.ID].ended = entry.Time
		}
	}
	return lives
}

// contradictions returns where what was to be seen of Machines and what there was in
// the cloud differ: Running says that the instance is there, and may say so for as long
// as limit after its end; an instance shows in its Machine no later than shown after it
// was made; and of a Machine that is gone no instance is left.
func contradictions(seen []sighting, log []cloudapi.LogEntry, limit, shown time.Duration, end time.Time) (wrong []string) {
	lives, byMachine := livesOf(log), map[string][]sighting{}
	for _, s := range seen {
		byMachine[s.uid] = append(byMachine[s.uid], s)
	}
	for _, list := range byMachine {
		for i, s := range list {
			until := end
			if i+1 < len(list) {
				until = list[i+1].at
			}
			wrong = append(wrong, s.judge(lives, limit, until)...)
		}
	}
	for _, l := range lives {
		if at := l.shown(byMachine[l.uid]); at.IsZero() && end.After(l.made.Add(shown)) || at.After(l.made.Add(shown)) {
			wrong = append(wrong, fmt.Sprintf("instance %s, made at %s, showed in its Machine at %s", l.id, l.made, at))
		}
	}
	return wrong
}

// judge holds a sighting, which was true until some moment, against the cloud.
func (s sighting) judge(lives map[string]*life, limit time.Duration, until time.Time) (wrong []string) {
	found := false
	for _, l := range lives {
		mine := strings.HasSuffix(s.providerID, "/"+l.id)
		found = found || mine && !l.made.After(s.at)
		switch {
		case s.gone && l.uid == s.uid && (l.ended.IsZero() || l.ended.After(s.at)):
			wrong = append(wrong, fmt.Sprintf("machine %s was gone at %s, and its instance %s was not: it ended at %s", s.name, s.at, l.id, l.ended))
		case !s.gone && s.phase == v1alpha1.MachineRunning && mine && !l.ended.IsZero() && until.After(l.ended.Add(limit)):
			wrong = append(wrong, fmt.Sprintf("machine %s was Running until %s, and its instance %s had ended at %s", s.name, until, l.id, l.ended))
		}
	}
	if !s.gone && s.phase == v1alpha1.MachineRunning && !found {
		wrong = append(wrong, fmt.Sprintf("machine %s was Running at %s with %q, which was not there", s.name, s.at, s.providerID))
	}
	return wrong
}

// shown returns when an instance was first to be seen in its Machine, or did not have
// to be any more: it was gone, or the Machine was on its way out.
func (l *life) shown(list []sighting) (at time.Time) {
	for _, s := range list {
		if strings.HasSuffix(s.providerID, "/"+l.id) || s.leaving || s.gone {
			at = s.at
			break
		}
	}
	if !l.ended.IsZero() && (at.IsZero() || l.ended.Before(at)) {
		at = l.ended
	}
	return at
}

func TestContradictions(t *testing.T) {
	t.Parallel()
	const limit = 10 * time.Second
	start := time.Now()
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	made := func(seconds int) cloudapi.LogEntry {
		return cloudapi.LogEntry{Op: cloudapi.OpCreate, Event: cloudapi.EventCreated, ID: "1", MachineUID: "m", Time: at(seconds)}
	}
	ended := func(seconds int) cloudapi.LogEntry {
		return cloudapi.LogEntry{Op: cloudapi.OpDelete, Event: cloudapi.EventDeleted, ID: "1", MachineUID: "m", Time: at(seconds)}
	}
	pending := func(seconds int) sighting { return sighting{at: at(seconds), uid: "m", phase: v1alpha1.MachinePending} }
	running := func(seconds int) sighting {
		return sighting{at: at(seconds), uid: "m", phase: v1alpha1.MachineRunning, providerID: "virtual:///1"}
	}
	leaving := func(seconds int) sighting {
		return sighting{at: at(seconds), uid: "m", phase: v1alpha1.MachineTerminating, providerID: "virtual:///1", leaving: true}
	}
	gone := func(seconds int) sighting { return sighting{at: at(seconds), uid: "m", gone: true} }
	for name, tc := range map[string]struct {
		seen []sighting
		log  []cloudapi.LogEntry
		want int
	}{
		"as it should be":            {[]sighting{pending(0), running(3), leaving(20), gone(25)}, []cloudapi.LogEntry{made(2), ended(24)}, 0},
		"Running without anything":   {[]sighting{running(1)}, nil, 1},
		"Running before it is made":  {[]sighting{running(1), leaving(4)}, []cloudapi.LogEntry{made(2)}, 1},
		"Running after its end":      {[]sighting{running(1), leaving(40)}, []cloudapi.LogEntry{made(0), ended(20)}, 1},
		"Running just after its end": {[]sighting{running(1), leaving(25)}, []cloudapi.LogEntry{made(0), ended(20)}, 0},
		"gone before its instance":   {[]sighting{running(1), leaving(2), gone(3)}, []cloudapi.LogEntry{made(0), ended(4)}, 1},
		"gone, its instance is not":  {[]sighting{running(1), leaving(2), gone(3)}, []cloudapi.LogEntry{made(0)}, 1},
		"made after it was gone":     {[]sighting{pending(0), leaving(1), gone(3)}, []cloudapi.LogEntry{made(4), ended(5)}, 1},
		"shown late":                 {[]sighting{pending(0), running(20)}, []cloudapi.LogEntry{made(2)}, 1},
		"never shown":                {[]sighting{pending(0)}, []cloudapi.LogEntry{made(2)}, 1},
		"never shown, and deleted":   {[]sighting{pending(0)}, []cloudapi.LogEntry{made(2), ended(5)}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := contradictions(tc.seen, tc.log, limit, limit, at(60)); len(got) != tc.want {
				t.Errorf("contradictions = %q, want %d", got, tc.want)
			}
		})
	}
}
