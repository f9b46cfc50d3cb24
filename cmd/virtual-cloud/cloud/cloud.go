// Package cloud is a cloud that exists in memory: a state machine of instances
// ([Cloud]) and the HTTP server before it ([NewHandler]). It behaves like a real
// one where drivers meet trouble: calls take time and outlive their clients,
// lists lag, limits bite, answers get lost, and two creates of one name make two
// instances unless the identity mode says otherwise.
//
// It knows nothing of Kubernetes: a [Listener] hears of instances that boot and
// stop. It keeps nothing on disk but its log, and no user data or credential at
// all.
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

// Options say how a cloud starts.
type Options struct {
	// Identity is the mode of creates that name none; empty means
	// [cloudapi.IdentityNone].
	Identity cloudapi.Identity
	// Knobs are where they stand at first. The zero value is a cloud without
	// delay, limit and fault.
	Knobs cloudapi.Knobs
	// Log receives the log as JSON lines; nil for nowhere. The cloud writes one
	// entry at a time and does not close it.
	Log io.Writer
	// Listener hears of instances; nil for nobody.
	Listener Listener
	// Logger receives the program's own log; nil means the default.
	Logger *slog.Logger
}

// A Listener hears what becomes of instances, in order. Its methods are called
// with the cloud locked, so they neither block nor call the cloud.
type Listener interface {
	// Booted says that an instance is running.
	Booted(i cloudapi.Instance)
	// Stopped says that an instance, booted or not, is switched off for good.
	Stopped(id string)
	// Knobs says where the knobs stand now.
	Knobs(k cloudapi.Knobs)
}

// A Cloud holds instances. Its methods are safe for concurrent use. They return
// a [*cloudapi.Error] when the cloud refuses.
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
	names     map[string]*claim // creates of unique names at work
	pools     map[string]*pool  // by name
	used      []usedToken       // oldest first
	held      []*held
	bornEarly int // creates at work whose instance exists already
}

// instance is one that exists, guarded by Cloud.mu. Its tags and addresses never
// change, so a copy of Instance may be read without.
type instance struct {
	cloudapi.Instance

	token    string // idempotency token, in whatever mode
	boot     *time.Timer
	deleting chan struct{} // closed when the delete at work ends; nil without one
}

// New starts a cloud. When ctx ends, calls that wait give up and instances boot
// no more.
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
		c.listener = nobody{}
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

// nobody listens where no Listener is given.
type nobody struct{}

func (nobody) Booted(cloudapi.Instance) {}
func (nobody) Stopped(string)           {}
func (nobody) Knobs(cloudapi.Knobs)     {}

// refuse makes a refusal, counts it and logs it as the end of entry's call,
// unless the operation only reads. c.mu is held.
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

// note logs what has happened whether or not the log can be written. c.mu is
// held.
func (c *Cloud) note(entry cloudapi.LogEntry) {
	if err := c.log.append(entry); err != nil {
		c.slog.Error("log entry lost", "op", entry.Op, "event", entry.Event, "instance", entry.ID, "err", err)
	}
}

// record logs what is about to happen; it must not where that fails. c.mu is
// held.
func (c *Cloud) record(entry cloudapi.LogEntry) *cloudapi.Error {
	if err := c.log.append(entry); err != nil {
		c.slog.Error("refusing what cannot be logged", "op", entry.Op, "event", entry.Event, "err", err)

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
		return fmt.Errorf("%q is no identity mode; use token, unique_name or none", string(i))
	}
}
