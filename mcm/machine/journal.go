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
// sends the same operation and not another one, and it is always read back, never
// worked out anew.
type journal struct {
	// Settled counts the operations whose outcome is stored.
	Settled int64 `json:"settled"`
	// Operation is the one begun and not settled; empty for none.
	Operation dispatch.Kind `json:"operation,omitempty"`
	// Begun is when.
	Begun *metav1.Time `json:"begun,omitempty"`
	// Failed is the operation that was settled last if it failed, and NotBefore
	// the earliest time for its next try. Class is the version of the class and
	// its secrets that it failed with: with another one there is no need to wait.
	Failed    dispatch.Kind `json:"failed,omitempty"`
	NotBefore *metav1.Time  `json:"notBefore,omitempty"`
	Class     string        `json:"class,omitempty"`
	// Lost is until when a create whose outcome nobody knows may yet make an
	// instance: a delete that began earlier proves nothing.
	Lost *metav1.Time `json:"lost,omitempty"`
	// Provider has the machine's instance, or has been asked to make it and may have
	// made a part; empty as long as nobody was asked.
	Provider string `json:"provider,omitempty"`
	// First says that the create begun is the first that Provider is asked for: if
	// it reaches no driver, Provider has nothing.
	First bool `json:"first,omitempty"`
	// StateOf is whose driver wrote status.lastKnownState, if that is not Provider;
	// empty also where another manager has stored it.
	StateOf string `json:"stateOf,omitempty"`
	// LastGood says that the operation begun, or the next try of the one that
	// failed, uses the class as it was last accepted.
	LastGood bool `json:"lastGood,omitempty"`
	// Return says that the delete is of an instance that must not join, of a
	// machine that stays. Without it a journal that came from a backup could have
	// a live machine's instance deleted.
	Return bool `json:"return,omitempty"`
	// Token says that the machine's bootstrap token could not be deleted although
	// its Node has joined: somebody has to try again.
	Token bool `json:"token,omitempty"`
}

func readJournal(m client.Object) (journal, error) {
	var j journal
	text, ok := m.GetAnnotations()[v1alpha1.AnnotationKeyOperation]
	if !ok {
		return j, nil
	}
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		return j, fmt.Errorf("annotation %s: %w (remove it if no operation of the machine is under way)",
			v1alpha1.AnnotationKeyOperation, err)
	}

	return j, nil
}

// UnderWay returns the id of the operation that the machine's journal says was
// begun and not settled; empty for none. That an initialization is settled stands in
// the phase alone, see markCreated.
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

// stateIsOf tells whether status.lastKnownState may be a provider's.
func (j journal) stateIsOf(provider string) bool {
	owner := cmp.Or(j.StateOf, j.Provider)

	return owner == "" || owner == provider
}

// begin notes that an operation is about to be sent to a provider's driver. IsNew
// tells that nothing was done for the machine before there was a journal.
func (j journal) begin(kind dispatch.Kind, provider string, isNew bool, now time.Time) journal {
	begun := journal{
		Settled: j.Settled, Operation: kind, Begun: &metav1.Time{Time: now}, Lost: j.Lost,
		Provider: j.Provider, StateOf: j.StateOf, LastGood: j.LastGood && j.Failed == kind, Return: j.Return, Token: j.Token,
	}
	if kind == dispatch.Create && j.Provider == "" {
		begun.Provider, begun.First = provider, isNew || j.Settled > 0
	}

	return begun
}

// settle notes that the outcome of the operation begun is stored.
func (j journal) settle() journal {
	return journal{Settled: j.Settled + 1, Provider: j.Provider, StateOf: j.StateOf, Lost: j.Lost, Token: j.Token}
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

// failed is settle for an outcome after which the operation is to be tried
// again, as another one, no sooner than after wait.
func (j journal) failed(now time.Time, wait time.Duration, class string) journal {
	return journal{
		Settled: j.Settled + 1, Failed: j.Operation, NotBefore: &metav1.Time{Time: now.Add(wait)}, Class: class,
		Lost: j.Lost, Provider: j.Provider, StateOf: j.StateOf, Return: j.Return, Token: j.Token,
	}
}

// doubtful tells how long after now the delete that was begun has to be repeated,
// because an instance may have appeared since; 0 for not at all.
func (j journal) doubtful(now time.Time) (wait time.Duration, again bool) {
	if j.Lost == nil || j.Begun != nil && !j.Begun.Before(j.Lost) {
		return 0, false
	}

	return max(0, j.Lost.Sub(now)), true
}

// wait is how long to wait before the next operation, if that is another try: a
// delete does not wait for what a create has to.
func (j journal) wait(kind dispatch.Kind, now time.Time, class string) time.Duration {
	if j.NotBefore == nil || j.Failed != kind || j.Class != class {
		return 0
	}

	return j.NotBefore.Sub(now)
}
