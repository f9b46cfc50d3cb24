package drain

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// A Request is the wish for one Node to be empty.
type Request struct {
	// UID and Machine name the machine, of which one drain runs at a time; Machine
	// is who gets the notices.
	UID     types.UID
	Machine types.NamespacedName
	// Deployment is the machine's MachineDeployment, for metrics; may be empty.
	Deployment string
	// Node is the machine's Node, as a cache has it: not nil, and never changed.
	Node *corev1.Node
	// Failed says that the machine goes because it was unhealthy, which the Node's
	// condition Terminating tells. If it tells anything already, that stands.
	Failed bool
	// Stays says that the Node is to be empty and not to go: it is neither told to be
	// terminating nor cordoned, and force leaves its volumes attached, as its instance
	// may be writing to them.
	Stays bool
	// Timeout is how long the drain may take.
	Timeout time.Duration
	// Force ends pods at once and without asking budgets, does not wait for them,
	// and then deletes the Node's VolumeAttachments unless it Stays.
	Force bool
	// MaxEvictRetries is how often a refused eviction is tried again before the pod
	// is deleted without asking its budgets.
	MaxEvictRetries int
}

// A Phase is how far a drain is.
type Phase int

// The phases of a drain.
const (
	// Running: Reason says what is waited for.
	Running Phase = iota
	// Done: it has ended; Err says how.
	Done
)

// A State is what is known of a drain.
type State struct {
	Phase Phase
	// Forced says whether it is a forced one.
	Forced bool
	// Reason says in one line what a running drain waits for; empty when for
	// nothing worth telling.
	Reason string
	// Held says that Reason is a refusal or failure, and not only that pods take
	// their time to end.
	Held bool
	// Err is how a Done drain failed, nil for success: the Node is empty, or gone.
	Err error
	// Ended is when a Done drain did.
	Ended time.Time
	// Took is the time that a Done drain took.
	Took time.Duration
}
