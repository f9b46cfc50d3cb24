// Package cloud is a cloud in memory: a state machine of instances ([Cloud]) and its
// HTTP server ([NewHandler]). It has the problems of real clouds: calls take time and
// outlive their clients, lists lag, quotas and rate limits apply, answers get lost, and
// two creates with one name make two instances unless the identity mode prevents that.
//
// It does not know Kubernetes: a [Listener] is notified of instances that boot and stop.
// On disk it stores only its log. It stores no user data and no credentials.
package cloud

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// tokenLife is how long an idempotency token outlives its instance.
const tokenLife = 24 * time.Hour

// Options configure a cloud.
type Options struct {
	// Identity is the mode of creates that name none; empty means
	// [cloudapi.IdentityNone].
	Identity cloudapi.Identity
	// Knobs are the initial knobs. The zero value is a cloud without delays, limits and
	// faults.
	Knobs cloudapi.Knobs
	// Log receives the log as JSON lines, one entry per write; it may be nil. The cloud
	// does not close it.
	Log io.Writer
	// Listener is notified of instances; it may be nil.
	Listener Listener
	// Logger receives the program's own log; nil means the default.
	Logger *slog.Logger
}

// A Listener is notified of changes of instances, in order. Its methods are called with
// the cloud locked, so they must neither block nor call the cloud.
type Listener interface {
	// Booted is called when an instance is running.
	Booted(i cloudapi.Instance)
	// Stopped is called when an instance, booted or not, is switched off for good.
	Stopped(id string)
	// Knobs is called when the knobs have changed.
	Knobs(k cloudapi.Knobs)
}

// A Cloud holds instances. Its methods are safe for concurrent use. They return a
// [*cloudapi.Error] if the cloud refuses a call.
type Cloud struct {
	ctx      context.Context // ends waits
	identity cloudapi.Identity
	listener Listener
	slog     *slog.Logger
	limiter  *rate.Limiter

	mu        sync.Mutex
	knobs     cloudapi.Knobs
	log       journal
	stats     cloudapi.Stats
	instances map[string]*instance
	order     []*instance // by creation
	tokens    map[string]*claim
	names     map[string]*claim // running creates of unique names
	pools     map[string]*pool  // by name
	used      []usedToken       // oldest first
	held      []*held
	bornEarly int // running creates whose instance exists already
}

// instance is an existing instance, guarded by Cloud.mu. Its tags and addresses never
// change, so a copy of Instance may be read without the lock.
type instance struct {
	cloudapi.Instance

	token    string // idempotency token, in any mode
	boot     *time.Timer
	deleting chan struct{} // closed when the running delete ends; nil if none runs
}

// New starts a cloud. When ctx ends, waiting calls fail and instances no longer boot.
func New(ctx context.Context, o Options) (*Cloud, error) {
	if o.Identity == "" {
		o.Identity = cloudapi.IdentityNone
	}
	if o.Knobs.CreateEffect == "" {
		o.Knobs.CreateEffect = cloudapi.EffectEnd
	}
	if err := checkIdentity(o.Identity); err != nil {
		return nil, err
	}
	if err := checkKnobs(&o.Knobs); err != nil {
		return nil, err
	}
	c := &Cloud{
		ctx: ctx, identity: o.Identity, listener: o.Listener, slog: o.Logger, limiter: rate.NewLimiter(rate.Inf, 1),
		log:       journal{out: o.Log},
		stats:     cloudapi.Stats{Requests: map[string]int{}, Refused: map[string]int{}},
		instances: map[string]*instance{}, tokens: map[string]*claim{}, names: map[string]*claim{}, pools: map[string]*pool{},
	}
	if c.slog == nil {
		c.slog = slog.Default()
	}
	if c.listener == nil {
		c.listener = noListener{}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.log.append(cloudapi.LogEntry{
		Op: cloudapi.LogStart, Event: cloudapi.EventStarted, Identity: o.Identity,
	}); err != nil {
		return nil, err
	}
	c.apply(o.Knobs)
	context.AfterFunc(ctx, c.stopBooting)

	return c, nil
}

func (c *Cloud) stopBooting() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, i := range c.order {
		i.boot.Stop()
	}
}

// noListener is used if no Listener is given.
type noListener struct{}

func (noListener) Booted(cloudapi.Instance) {}
func (noListener) Stopped(string)           {}
func (noListener) Knobs(cloudapi.Knobs)     {}

// refuse counts a refusal, and logs it as the end of entry's call unless the operation
// only reads. c.mu is held.
func (c *Cloud) refuse(entry cloudapi.LogEntry, err *cloudapi.Error) *cloudapi.Error {
	c.stats.Refused[err.Code]++
	if entry.Op == cloudapi.OpGet || entry.Op == cloudapi.OpList {
		return err
	}
	entry.Event, entry.Status, entry.Code = cloudapi.EventRefused, err.Status, err.Code
	if entry.ID == "" {
		entry.ID = err.InstanceID
	}
	c.note(entry)

	return err
}

// note logs an event that has already happened, even if the log cannot be written.
// c.mu is held.
func (c *Cloud) note(entry cloudapi.LogEntry) {
	if err := c.log.append(entry); err != nil {
		c.slog.Error("log entry lost", "op", entry.Op, "event", entry.Event, "instance", entry.ID, "err", err)
	}
}

// record logs an event before it happens. If it returns an error, it must not happen.
// c.mu is held.
func (c *Cloud) record(entry cloudapi.LogEntry) *cloudapi.Error {
	if err := c.log.append(entry); err != nil {
		c.slog.Error("call refused because the log cannot be written", "op", entry.Op, "event", entry.Event, "err", err)

		return refusal(http.StatusInternalServerError, cloudapi.CodeInternal, "%v", err)
	}

	return nil
}

func refusal(status int, code, format string, args ...any) *cloudapi.Error {
	return &cloudapi.Error{Status: status, Code: code, Message: fmt.Sprintf(format, args...)}
}

func notFound(id string) *cloudapi.Error {
	return refusal(http.StatusNotFound, cloudapi.CodeNotFound, "there is no instance %q", id)
}

// errShutdown ends waits without effect.
func errShutdown() *cloudapi.Error {
	return refusal(http.StatusServiceUnavailable, cloudapi.CodeUnavailable, "the cloud is shutting down; nothing was done")
}

// pause waits for d, or until the cloud shuts down.
func (c *Cloud) pause(d time.Duration) *cloudapi.Error {
	if d <= 0 {
		return nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-c.ctx.Done():
		return errShutdown()
	}
}

func checkIdentity(i cloudapi.Identity) error {
	switch i {
	case cloudapi.IdentityToken, cloudapi.IdentityUniqueName, cloudapi.IdentityNone:
		return nil
	default:
		return fmt.Errorf("%q is not an identity mode; use token, unique_name or none", string(i))
	}
}
