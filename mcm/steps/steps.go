// Package steps runs the passes of a reconciler. A pass is one look at one object. It
// takes steps in a fixed order until one of them has to wait. No step blocks: the event
// that it waits for starts the next pass.
package steps

import (
	"context"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// ConflictRetry is the time after which a pass whose write conflicted is repeated. The
// event of the other write starts a pass too, unless it came before our write failed.
const ConflictRetry = 200 * time.Millisecond

// soonest is the shortest time between two passes; 0 would mean no other pass.
const soonest = time.Millisecond

// A Step does one part of a pass.
type Step func(ctx context.Context) (Next, error)

// A Next says what follows a step.
type Next struct {
	// Stop ends the pass.
	Stop bool
	// After is when the next pass starts if no event starts one earlier; 0 for never.
	After time.Duration
}

// The two common answers of a step.
var (
	Proceed = Next{}           // go on with the next step
	Wait    = Next{Stop: true} // wait for an event
)

// Again ends the pass and starts another one after d.
func Again(d time.Duration) Next { return Next{Stop: true, After: max(d, soonest)} }

// Run takes steps in order. It returns the answer of the first one that stops or fails,
// or Proceed after the last one.
func Run(ctx context.Context, steps ...Step) (Next, error) {
	for _, step := range steps {
		if n, err := step(ctx); n.Stop || err != nil {
			return n, err
		}
	}

	return Proceed, nil
}

// A Schedule collects when an object is to be looked at again, whatever the answers of
// the steps are. The zero value is ready. It is not safe for concurrent use.
type Schedule struct{ after time.Duration }

// LookAgain asks for another pass after d at the latest. The current one goes on.
func (s *Schedule) LookAgain(d time.Duration) { s.after = Sooner(s.after, max(d, soonest)) }

// After returns the shortest time that was asked for; 0 for none.
func (s *Schedule) After() time.Duration { return s.after }

// Sooner returns the shorter of two times, of which 0 means never.
func Sooner(a, b time.Duration) time.Duration {
	if a == 0 || b == 0 {
		return a + b
	}

	return min(a, b)
}

// Outdated reports whether err says that an object was changed or removed since it was
// read. The next pass reads it again.
func Outdated(err error) bool { return apierrors.IsConflict(err) || apierrors.IsNotFound(err) }

// Result returns a pass's outcome for controller-runtime: the next pass starts after
// after, 0 for never. An object that is outdated is no error.
func Result(log logr.Logger, after time.Duration, err error) (reconcile.Result, error) {
	if Outdated(err) {
		log.V(1).Info("object has changed, looking again", "err", err.Error())

		return reconcile.Result{RequeueAfter: ConflictRetry}, nil
	}
	if err != nil {
		return reconcile.Result{}, err
	}

	return reconcile.Result{RequeueAfter: after}, nil
}
