package cloudapi

import (
	"fmt"
	"time"
)

// A Duration is encoded as Go formats durations, such as "1.5s".
type Duration time.Duration

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("%q is not a duration; write one such as \"1.5s\"", text)
	}
	*d = Duration(parsed)

	return nil
}

// An Effect is the moment at which a create takes effect.
type Effect string

const (
	EffectStart Effect = "start" // the instance exists before hold and latency
	EffectEnd   Effect = "end"   // the instance exists after them
)

// Knobs define how the cloud behaves. Patterns as in path.Match match the names of
// instances.
type Knobs struct {
	// CreateLatency and DeleteLatency are how long these calls take. They continue if the
	// client disconnects.
	CreateLatency Duration `json:"createLatency"`
	DeleteLatency Duration `json:"deleteLatency"`
	CreateEffect  Effect   `json:"createEffect"`
	// BootDelay is how long a new instance is pending.
	BootDelay Duration `json:"bootDelay"`
	// ListLag is how long a new instance is missing from lists.
	ListLag Duration `json:"listLag"`
	// Quota is how many instances may exist; 0 means any number.
	Quota int `json:"quota"`
	// RequestsPerSecond limits calls other than the admin's; 0 means no limit.
	RequestsPerSecond float64 `json:"requestsPerSecond"`
	// Hold are patterns of names whose creates wait, before the latency, until no pattern
	// matches or they are released.
	Hold []string `json:"hold"`
	// Faults are rules of which the first that matches applies.
	Faults []Fault `json:"faults"`
	// NodeNotReady are patterns of instances whose Nodes report Ready=False, NodeSilent of
	// those whose kubelet is dead, NodeRefuse of those that do not join. They have an
	// effect only if instances join a cluster.
	NodeNotReady []string `json:"nodeNotReady"`
	NodeSilent   []string `json:"nodeSilent"`
	NodeRefuse   []string `json:"nodeRefuse"`
}

// A KnobsPatch changes the knobs that it names and leaves the others. A list
// replaces the whole list; an empty one clears it.
type KnobsPatch struct {
	CreateLatency     *Duration `json:"createLatency,omitempty"`
	DeleteLatency     *Duration `json:"deleteLatency,omitempty"`
	CreateEffect      *Effect   `json:"createEffect,omitempty"`
	BootDelay         *Duration `json:"bootDelay,omitempty"`
	ListLag           *Duration `json:"listLag,omitempty"`
	Quota             *int      `json:"quota,omitempty"`
	RequestsPerSecond *float64  `json:"requestsPerSecond,omitempty"`
	Hold              *[]string `json:"hold,omitempty"`
	Faults            *[]Fault  `json:"faults,omitempty"`
	NodeNotReady      *[]string `json:"nodeNotReady,omitempty"`
	NodeSilent        *[]string `json:"nodeSilent,omitempty"`
	NodeRefuse        *[]string `json:"nodeRefuse,omitempty"`
}

// A Fault is a rule about calls that go wrong.
type Fault struct {
	// Operation is one of the Op constants, or "*".
	Operation string `json:"operation"`
	// Name limits the rule to instances whose name matches; lists and unknown
	// instances have the name "". Empty means every call.
	Name string `json:"name,omitempty"`
	// Next limits the rule to so many calls and counts down; at 0 the rule is removed. 0
	// initially means no limit.
	Next int `json:"next,omitempty"`
	// Probability, above 0 and at most 1, is that of the rule to apply. 0 means always.
	Probability float64 `json:"probability,omitempty"`
	// After lets the call do its work and loses only the answer; otherwise nothing is
	// done.
	After bool `json:"after,omitempty"`
	// Drop closes the connection instead of answering.
	Drop bool `json:"drop,omitempty"`
	// Status, Code, Message and RetryAfter are the answer unless Drop is set. They default
	// to 500, "Internal", and a text about the rule.
	Status     int      `json:"status,omitempty"`
	Code       string   `json:"code,omitempty"`
	Message    string   `json:"message,omitempty"`
	RetryAfter Duration `json:"retryAfter,omitzero"`
}

// A ReleaseRequest names the held creates to release by a pattern.
type ReleaseRequest struct {
	Name string `json:"name"`
}

// A ReleaseResponse is the number of creates that were released.
type ReleaseResponse struct {
	Released int `json:"released"`
}

// A TokensRequest replaces the accepted API tokens. Without tokens no call is admitted.
// The admin's token stays valid.
type TokensRequest struct {
	Tokens []string `json:"tokens"`
}
