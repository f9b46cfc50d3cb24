package drain

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// A Request asks to drain one Node.
type Request struct {
	// UID and Machine identify the machine. It has one drain at a time, whose notices are
	// for Machine.
	UID     types.UID
	Machine types.NamespacedName
	// Deployment is the machine's MachineDeployment, for metrics; may be empty.
	Deployment string
	// Node is the machine's Node from a cache: not nil, and never changed.
	Node *corev1.Node
	// Failed says that the machine is deleted because it was unhealthy. The Node's condition
	// Terminating shows that, unless it was set before.
	Failed bool
	// Stays says that the Node is emptied but not deleted: it gets no condition Terminating
	// and is not cordoned. A forced drain leaves its volumes attached, because the instance
	// may be writing to them.
	Stays bool
	// Timeout is how long the drain may take.
	Timeout time.Duration
	// Force deletes pods at once, whatever their budgets allow, does not wait for them, and
	// then deletes the Node's VolumeAttachments unless the Node Stays.
	Force bool
	// MaxEvictRetries is how often a refused eviction is retried before the pod is deleted
	// whatever its budgets allow.
	MaxEvictRetries int
}

// A Phase says whether a drain has ended.
type Phase int

// The phases of a drain.
const (
	// Running: Reason says what the drain waits for.
	Running Phase = iota
	// Done: the drain has ended; Err is nil if it succeeded.
	Done
)

// A State is the state of a drain.
type State struct {
	Phase Phase
	// Forced says whether the drain is forced.
	Forced bool
	// Reason says in one line what a running drain waits for; may be empty.
	Reason string
	// Blocked says that Reason is a refusal or an error. Otherwise pods are terminating.
	Blocked bool
	// Err is why a Done drain failed; nil if the Node is empty or gone.
	Err error
	// Ended is when a Done drain ended, and Took how long it took.
	Ended time.Time
	Took  time.Duration
}
