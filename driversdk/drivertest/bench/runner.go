package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"
)

// A Runner runs a check. As with a testing.T, a method that finds something wrong ends the check: it reads as the list
// of what must hold. All of it runs on one goroutine.
type Runner struct {
	ctx      context.Context
	patience time.Duration        // see Config.Patience
	settle   func() time.Duration // the driver's settle time
	steps    []string
	cleanups []func()
	err      error
}

// SkipError is the error of a check that could not be made.
type SkipError struct {
	reason string
	// Unbound: the clause does not bind the driver.
	Unbound bool
}

func (s SkipError) Error() string { return s.reason }

func skipped(err error) bool {
	_, is := errors.AsType[SkipError](err)

	return is
}

// run runs f and the cleanups. It returns nil, a [SkipError], or what is wrong with the driver.
func (r *Runner) run(f func()) error {
	err := r.Try(f)
	for _, cleanup := range slices.Backward(r.cleanups) {
		failed := r.Try(cleanup)
		if skipped(err) && failed != nil {
			err = nil // it counts as failed
		}
		err = errors.Join(err, failed)
	}

	return err
}

// Try runs a part of the check, and returns the error that ended it.
func (r *Runner) Try(f func()) error {
	done := make(chan struct{})
	go func() { // which Goexit ends
		defer close(done)
		f()
	}()
	<-done
	err := r.err
	r.err = nil

	return err
}

// Cleanup has f run when the check has ended.
func (r *Runner) Cleanup(f func()) { r.cleanups = append(r.cleanups, f) }

// Context ends with the check.
func (r *Runner) Context() context.Context { return r.ctx }

// Step runs a part of the check; what names it in errors.
func (r *Runner) Step(what string, f func()) {
	r.steps = append(r.steps, what)
	defer func() { r.steps = r.steps[:len(r.steps)-1] }()
	f()
}

// Must ends the check if err is not nil.
func (r *Runner) Must(err error) {
	if err == nil {
		return
	}
	if !skipped(err) && len(r.steps) > 0 {
		err = fmt.Errorf("%s: %w", strings.Join(r.steps, ": "), err)
	}
	r.err = errors.Join(r.err, err)
	runtime.Goexit()
}

// Failf ends the check: the driver breaks the clause.
func (r *Runner) Failf(format string, args ...any) { r.Must(fmt.Errorf(format, args...)) }

// Skipf ends the check: the clause binds the driver, and cannot be checked here.
func (r *Runner) Skipf(format string, args ...any) {
	r.Must(SkipError{reason: fmt.Sprintf(format, args...)})
}

// Unboundf ends the check: the clause does not bind the driver, by what it says of itself.
func (r *Runner) Unboundf(format string, args ...any) {
	r.Must(SkipError{reason: fmt.Sprintf(format, args...), Unbound: true})
}

// Poll calls ok until it returns true, for as long as most and the driver's settle time. It
// reports whether ok did.
func (r *Runner) Poll(most time.Duration, ok func() bool) bool {
	limit := time.NewTimer(most + r.settle())
	defer limit.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-limit.C:
			return false
		case <-r.ctx.Done():
			r.Must(context.Cause(r.ctx))
		}
	}

	return true
}

// Within fails unless ok returns true in time; see [Runner.Poll].
func (r *Runner) Within(most time.Duration, what string, ok func() bool) {
	if !r.Poll(most, ok) {
		r.Failf("timed out waiting until %s", what)
	}
}

// Eventually is Within for as long as the check has patience.
func (r *Runner) Eventually(what string, ok func() bool) { r.Within(r.patience, what, ok) }

// Pause waits where no event says that the time has come, such as for a frame that must not come.
func (r *Runner) Pause(d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.ctx.Done():
		r.Must(context.Cause(r.ctx))
	}
}

// Settle waits for as long as the cloud's list may lag behind.
func (r *Runner) Settle() { r.Pause(r.settle()) }
