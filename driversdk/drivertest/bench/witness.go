package bench

import (
	"fmt"
	"strings"
	"sync"

	"github.com/nats-io/nats.go"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

const (
	// secretLength is how long a value must be to be recognised in a text.
	secretLength = 6
	// blamesKept bounds what is said of one clause.
	blamesKept = 5
)

// A Witness remembers which clauses were seen broken, whichever check ran.
type Witness struct {
	witnessMu    sync.Mutex
	blames       map[string][]string      // by clause
	confidential func() map[string]string // what no text may hold, by its name
}

// Blamef records that a clause was broken.
func (w *Witness) Blamef(clause, format string, args ...any) {
	w.witnessMu.Lock()
	defer w.witnessMu.Unlock()
	if w.blames == nil {
		w.blames = map[string][]string{}
	}
	if len(w.blames[clause]) < blamesKept {
		w.blames[clause] = append(w.blames[clause], fmt.Sprintf(format, args...))
	}
}

// Leak looks in a text for what the driver was given in confidence, and does not say what it found.
func (w *Witness) Leak(clause, where, text string) {
	if text == "" {
		return
	}
	for name, value := range w.confidential() {
		if len(value) >= secretLength && strings.Contains(text, value) {
			w.Blamef(clause, "%s holds the value of %s", where, name)
		}
	}
}

// Witnessed fails if a clause was seen broken.
func (c *Check) Witnessed(clause string) {
	c.witnessMu.Lock()
	seen := strings.Join(c.blames[clause], "; ")
	c.witnessMu.Unlock()
	if seen != "" {
		c.Failf("%s", seen)
	}
}

// examine checks what the contract says of all frames.
func (b *Bench) examine(x *Exchange, m *nats.Msg, f Frame) {
	if !x.loose && (f.GetOperationId() != x.id || f.GetAttempt() != x.Attempt) {
		b.Blamef("ENV-5", "%s: a frame names operation %q, attempt %d, but the request named %q, attempt %d",
			x.verb, f.GetOperationId(), f.GetAttempt(), x.id, x.Attempt)
	}
	b.mu.Lock()
	known := b.Plain || len(b.sessions[f.GetReplica()]) > 0
	b.mu.Unlock()
	if !b.Plain && (f.GetReplica() == "" || !known) {
		b.Blamef("ENV-7", "%s: a frame names replica %q, which has sent no session", x.verb, f.GetReplica())
	}
	b.count(x, f)
	b.Leak("STATUSTEXT-1", "the header "+bus.HeaderError, m.Header.Get(bus.HeaderError))
	b.Leak("PROGRESS-1", "a progress frame", f.GetProgress().GetMessage())
	r := f.GetResult()
	b.Leak("STATUSTEXT-1", "the status of "+x.verb, r.GetStatus().GetMessage())
	b.Leak("MACHINE-2", "last_known_state after "+x.verb, lastKnownState(r))
	b.examineInstances(x, r)
}

func (w *Witness) examineInstances(x *Exchange, r *driverv1.Result) {
	for _, instance := range instancesOf(r) {
		if id := instance.GetProviderId(); id == "" {
			w.Blamef("INSTANCE-1", "%s returned an instance without a provider_id", x.verb)
		} else if scheme, rest, ok := strings.Cut(id, "://"); !ok || scheme == "" || rest == "" {
			w.Blamef("INSTANCE-1", "%s returned provider_id %q: want <provider>://<opaque>", x.verb, id)
		}
		if r.GetList() != nil && instance.GetMachineName() == "" {
			w.Blamef("INSTANCE-2", "list returned instance %q without a machine_name", instance.GetProviderId())
		}
	}
}

// count keeps the books of accepted requests and their results.
func (b *Bench) count(x *Exchange, f Frame) {
	b.mu.Lock()
	first := x.accepted+x.results == 0
	x.came++
	x.misnumbered = x.misnumbered || f.GetAttempt() != x.Attempt
	switch {
	case f.GetAccepted() != nil:
		x.accepted++
	case f.GetResult() != nil:
		x.results++
	}
	results := x.results
	code := f.GetResult().GetStatus().GetCode()
	b.noteOutcome(x, f)
	b.mu.Unlock()
	if f.GetResult() != nil && results > 1 {
		b.Blamef("RESULT-1", "%s was answered with %d results", x.verb, results)
	}
	if !b.Plain && x.mutates && first && f.GetResult() != nil && code == driverv1.Code_CODE_OK {
		b.Blamef("ACCEPT-1", "%s was done without a word that it was accepted", x.verb)
	}
}

func instancesOf(r *driverv1.Result) []*driverv1.Instance {
	all := append([]*driverv1.Instance(nil), r.GetList().GetInstances()...)
	for _, one := range []*driverv1.Instance{
		r.GetCreate().GetInstance(), r.GetInitialize().GetInstance(), r.GetInstanceStatus().GetInstance(),
	} {
		if one != nil {
			all = append(all, one)
		}
	}

	return all
}

func lastKnownState(r *driverv1.Result) string {
	return r.GetCreate().GetLastKnownState() + r.GetInitialize().GetLastKnownState() + r.GetDelete().GetLastKnownState()
}
