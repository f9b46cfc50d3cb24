package drivertest

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

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

// blamef records that a clause was broken, whichever check was under way.
func (s *suite) blamef(clause, format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.blames[clause]) < blamesKept {
		s.blames[clause] = append(s.blames[clause], fmt.Sprintf(format, args...))
	}
}

// witnessed returns what was recorded of a clause.
func (s *suite) witnessed(clause string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if seen := s.blames[clause]; len(seen) > 0 {
		return fmt.Errorf("%s", strings.Join(seen, "; "))
	}

	return nil
}

// witness holds every frame against what is said of all of them.
func (s *suite) witness(x *exchange, m *nats.Msg, f frame) {
	if !x.loose && (f.GetOperationId() != x.id || f.GetAttempt() != x.attempt) {
		s.blamef("ENV-5", "%s: a frame says operation %q, attempt %d, where the request said %q, attempt %d",
			x.verb, f.GetOperationId(), f.GetAttempt(), x.id, x.attempt)
	}
	s.mu.Lock()
	known := s.plain || len(s.sessions[f.GetReplica()]) > 0
	s.mu.Unlock()
	if !s.plain && (f.GetReplica() == "" || !known) {
		s.blamef("ENV-7", "%s: a frame says replica %q, which is none that has sent a session", x.verb, f.GetReplica())
	}
	s.count(x, f)
	s.leak("STATUSTEXT-1", "the header Nats-Service-Error", m.Header.Get("Nats-Service-Error"))
	s.leak("PROGRESS-1", "a progress frame", f.GetProgress().GetMessage())
	r := f.GetResult()
	s.leak("STATUSTEXT-1", "the status of "+x.verb, r.GetStatus().GetMessage())
	s.leak("MACHINE-2", "last_known_state after "+x.verb,
		r.GetCreate().GetLastKnownState()+r.GetInitialize().GetLastKnownState()+r.GetDelete().GetLastKnownState())
	s.lookAtInstances(x, r)
}

func (s *suite) lookAtInstances(x *exchange, r *driverv1.Result) {
	for _, instance := range instancesOf(r) {
		if id := instance.GetProviderId(); id == "" {
			s.blamef("INSTANCE-1", "%s returned an instance without a provider_id", x.verb)
		} else if scheme, rest, ok := strings.Cut(id, "://"); !ok || scheme == "" || rest == "" {
			s.blamef("INSTANCE-1", "%s returned provider_id %q: want <provider>://<opaque>", x.verb, id)
		}
		if r.GetList() != nil && instance.GetMachineName() == "" {
			s.blamef("INSTANCE-2", "list returned instance %q without a machine_name", instance.GetProviderId())
		}
	}
}

// count keeps the books of accepted requests and their results.
func (s *suite) count(x *exchange, f frame) {
	s.mu.Lock()
	first := x.accepted+x.results == 0
	x.misnumbered = x.misnumbered || f.GetAttempt() != x.attempt
	switch {
	case f.GetAccepted() != nil:
		x.accepted++
	case f.GetResult() != nil:
		x.results++
	}
	results := x.results
	s.mu.Unlock()
	code := f.GetResult().GetStatus().GetCode()
	if f.GetResult() != nil && results > 1 {
		s.blamef("RESULT-1", "%s was answered with %d results", x.verb, results)
	}
	if !s.plain && x.mutates && first && f.GetResult() != nil && code == driverv1.Code_CODE_OK {
		s.blamef("ACCEPT-1", "%s was done without a word that it was accepted", x.verb)
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

// leak looks for what the driver was given in confidence. It does not say what it
// found.
func (s *suite) leak(clause, where, text string) {
	if text == "" {
		return
	}
	for name, value := range s.confidential() {
		if len(value) >= secretLength && strings.Contains(text, value) {
			s.blamef(clause, "%s holds the value of %s", where, name)
		}
	}
}

// confidential returns what must not be told, by what it is.
func (s *suite) confidential() map[string]string {
	values := map[string]string{}
	for _, secret := range s.cfg.Secrets {
		for key, value := range secret.Data {
			values["secret "+secret.Name+", key "+key] = string(value)
		}
	}
	for name, value := range s.cfg.Bootstrap {
		values["bootstrap value "+name] = value
	}
	s.fetches.mu.Lock()
	defer s.fetches.mu.Unlock()
	for key, value := range s.fetches.secret {
		values["a secret with a wrong value, key "+key] = string(value)
	}

	return values
}

// acknowledged reads JetStream's answer to a write by compare-and-set.
func acknowledged(m *nats.Msg) (stored bool, err error) {
	var ack struct {
		Error *struct {
			ErrCode     int    `json:"err_code"`
			Description string `json:"description"`
		} `json:"error"`
		Sequence uint64 `json:"seq"`
	}
	if err := json.Unmarshal(m.Data, &ack); err != nil {
		return false, fmt.Errorf("answer of the operations stream: %w", err)
	}
	const wrongLast, wrongLastConstant = 10071, 10164
	switch {
	case ack.Error == nil:
		return true, nil
	case ack.Error.ErrCode == wrongLast, ack.Error.ErrCode == wrongLastConstant:
		return false, nil
	default:
		return false, fmt.Errorf("operations stream: %s", ack.Error.Description)
	}
}

// unfinished names the accepted requests that got no result.
func (s *suite) unfinished() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []string
	for _, x := range s.exchanges {
		if x.accepted > 0 && x.results == 0 && !x.moved {
			all = append(all, x.verb+" ("+x.id+")")
		}
	}

	return all
}

// has tells whether the driver does an operation, as far as it says. A plain
// driver says nothing and is asked.
func (s *suite) has(op driverv1.Operation) error {
	if s.plain {
		return nil
	}
	if slices.Contains(s.session().GetCapabilities(), op) {
		return nil
	}

	return unboundf("the driver does not implement %s", bus.Verb(op))
}
