package machine

import (
	"cmp"
	"encoding/json"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// A journal is what the Machine's annotation says of its operations. It is
// written before an operation is first sent, so that a manager that takes over
// sends the same operation and not another one. It is always read back, and never
// computed again.
type journal struct {
	// Settled counts the operations whose outcome is stored.
	Settled int64 `json:"settled"`
	// Operation is the one under way; empty for none.
	Operation dispatch.Kind `json:"operation,omitempty"`
	// Begun is when it was journaled.
	Begun *metav1.Time `json:"begun,omitempty"`
	// Failed is the operation that was settled last if it failed, and NotBefore
	// the earliest time for its next try. Class is the version of the class and
	// its secrets that it failed with: with another one there is no need to wait.
	Failed    dispatch.Kind `json:"failed,omitempty"`
	NotBefore *metav1.Time  `json:"notBefore,omitempty"`
	Class     string        `json:"class,omitempty"`
	carried
}

// carried is what a journal entry takes over from the one before. A transition copies
// it as a whole, and names what it drops.
type carried struct {
	// Lost is the time until which a create with an unknown outcome may still make an
	// instance. A delete that began earlier proves nothing.
	Lost *metav1.Time `json:"lost,omitempty"`
	// Provider has the machine's instance, or was asked to make it and may have
	// made a part; empty as long as no driver was asked.
	Provider string `json:"provider,omitempty"`
	// First says that the create under way is the first that Provider is asked for: if
	// it reaches no driver, Provider has nothing.
	First bool `json:"first,omitempty"`
	// StateOf is the provider whose driver wrote status.lastKnownState, if that is not
	// Provider; empty also where another manager has stored it.
	StateOf string `json:"stateOf,omitempty"`
	// LastGood says that the operation under way, or the next try of the one that
	// failed, uses the class as it was last accepted.
	LastGood bool `json:"lastGood,omitempty"`
	// Return says that the delete is of an instance that must not join, of a
	// machine that stays. Without it a journal that came from a backup could have
	// a live machine's instance deleted.
	Return bool `json:"return,omitempty"`
	// Token says that the machine's bootstrap token could not be deleted although
	// its Node has joined: the deletion has to be retried.
	Token bool `json:"token,omitempty"`
}

func readJournal(m client.Object) (journal, error) {
	var j journal
	text, ok := m.GetAnnotations()[v1alpha1.AnnotationKeyOperation]
	if !ok {
		return j, nil
	}
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		return j, fmt.Errorf("annotation %s: %w: nothing is done for this Machine until it is mended; "+
			"remove it if mcmctl ops lists no operation of the machine",
			v1alpha1.AnnotationKeyOperation, err)
	}

	return j, nil
}

// UnderWay returns the id of the operation that is under way by the machine's journal;
// empty for none. Only the phase says that an initialization is settled, see markCreated.
func UnderWay(m *v1alpha1.Machine) (operationID string) {
	j, err := readJournal(m)
	if err != nil || j.Operation == "" || j.Operation == dispatch.Initialize && !creating(m) {
		return ""
	}

	return dispatch.OperationID(m.UID, j.Operation, j.Settled)
}

func (j journal) write(m *v1alpha1.Machine) error {
	if j.StateOf == j.Provider {
		j.StateOf = ""
	}
	text, err := json.Marshal(j)
	if err != nil {
		return fmt.Errorf("annotation %s: %w", v1alpha1.AnnotationKeyOperation, err)
	}
	metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.AnnotationKeyOperation, string(text))

	return nil
}

// stateIsOf reports whether status.lastKnownState may be a provider's.
func (j journal) stateIsOf(provider string) bool {
	owner := cmp.Or(j.StateOf, j.Provider)

	return owner == "" || owner == provider
}

// begin notes that an operation is about to be sent to a provider's driver. IsNew
// says that nothing was done for the machine before there was a journal.
func (j journal) begin(kind dispatch.Kind, provider string, isNew bool, now time.Time) journal {
	next := journal{Settled: j.Settled, Operation: kind, Begun: &metav1.Time{Time: now}, carried: j.carried}
	next.First, next.LastGood = false, j.LastGood && j.Failed == kind
	if kind == dispatch.Create && j.Provider == "" {
		next.Provider, next.First = provider, isNew || j.Settled > 0
	}

	return next
}

// overtake is begin behind a later operation than the journal counts.
func (j journal) overtake(kind dispatch.Kind, provider string, later int64, now time.Time) journal {
	next := journal{Settled: later + 1, carried: j.carried}.begin(kind, provider, false, now)
	next.LastGood = j.LastGood

	return next
}

// settle notes that the outcome of the operation under way is stored.
func (j journal) settle() journal { return j.settleAs(j.Settled + 1) }

// settleAs is settle with another count of settled operations.
func (j journal) settleAs(settled int64) journal {
	next := journal{Settled: settled, carried: j.carried}
	next.First, next.LastGood, next.Return = false, false, false

	return next
}

// discard is settle for an operation that no driver has seen.
func (j journal) discard() journal {
	next := j.settle()
	next.Return = j.Return
	if j.First {
		next.Provider = ""
	}

	return next
}

// fail is settle for an outcome after which the operation is to be tried
// again, as another one, no sooner than after wait.
func (j journal) fail(now time.Time, wait time.Duration, class string) journal {
	next := j.settle()
	next.Return = j.Return
	next.Failed, next.NotBefore, next.Class = j.Operation, &metav1.Time{Time: now.Add(wait)}, class

	return next
}

// returned is settle for the delete of an instance that must not join. What the driver
// remembers stays its own, although it no longer has the instance.
func (j journal) returned(now time.Time, wait time.Duration, class string) journal {
	next := j.settle()
	next.Failed, next.NotBefore, next.Class = dispatch.Create, &metav1.Time{Time: now.Add(wait)}, class
	next.Provider, next.StateOf = "", cmp.Or(j.StateOf, j.Provider)

	return next
}

// doubtful reports whether the delete under way has to be repeated, and after how long,
// because an instance may have appeared since it began.
func (j journal) doubtful(now time.Time) (wait time.Duration, again bool) {
	if j.Lost == nil || j.Begun != nil && !j.Begun.Before(j.Lost) {
		return 0, false
	}

	return max(0, j.Lost.Sub(now)), true
}

// wait returns how long to wait before the next operation, if that is another try: a
// delete does not wait for the retry of a create.
func (j journal) wait(kind dispatch.Kind, now time.Time, class string) time.Duration {
	if j.NotBefore == nil || j.Failed != kind || j.Class != class {
		return 0
	}

	return j.NotBefore.Sub(now)
}
