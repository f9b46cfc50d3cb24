package autoscaler

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/machinebus/machinebus/mcm/dispatch"
)

const (
	// providerPrefix begins the ids of groups that a driver serves over the bus. No
	// namespace has a colon in its name, so they differ from those of deployments.
	providerPrefix = "provider:"
	// pollEvery is how often drivers are asked at least, pollApart at most.
	pollEvery, pollApart = 5 * time.Second, 500 * time.Millisecond
	// askTimeout is for one answer, of a provider or about one of its groups; askAtOnce
	// is how many of its groups a provider is asked about at a time.
	askTimeout = 10 * time.Second
	askAtOnce  = 8
	// providerGrace is how long the last answer of a provider that is away counts: a
	// driver that is updated is missed by nobody. After it the provider's groups are
	// left out, so that the cluster-autoscaler asks others for nodes.
	providerGrace = time.Minute
	// settleTimeout is how long a change that was made may be held up by the question
	// what size the group has now.
	settleTimeout = time.Second
)

// A GroupSource asks drivers; dispatch.NodeGroups is one.
type GroupSource interface {
	Providers() []string
	Groups(ctx context.Context, provider string) ([]dispatch.NodeGroup, error)
	Instances(ctx context.Context, provider, group string) ([]dispatch.NodeGroupInstance, error)
	Resize(ctx context.Context, provider, group string, expected, target int32) (int32, error)
	Delete(ctx context.Context, provider, group string, instances []string) (int32, error)
}

// Provided are the node groups that drivers serve over the bus, as they last were:
// it asks in the background, because the cluster-autoscaler cannot wait for a
// driver, and one that is away must not keep the others from growing.
type Provided struct {
	source GroupSource
	now    func() time.Time
	kicked chan struct{}

	mu        sync.Mutex
	providers map[string]*providerState
	disputed  map[string]bool // instances that two providers claim
}

// A providerState is what is known of a provider. Groups are never changed, only
// replaced.
type providerState struct {
	groups map[string]*providedGroup // by the gateway's id
	heard  time.Time
	writes int // ours; an answer from before one of them is old
	away   bool
	told   map[string]string // what was last logged of a group, by the gateway's id
	asking map[string]bool   // groups whose instances are being asked for
	turns  chan struct{}     // one of askAtOnce
}

// A providedGroup is a group that a driver serves.
type providedGroup struct {
	dispatch.NodeGroup

	id       string // the gateway's
	provider string

	instances []dispatch.NodeGroupInstance
	listed    time.Time // when they were asked for; zero as long as they are not known
	fault     string    // why they could not be had last
	writes    int       // ours, as in providerState
	resizes   int       // those of them that were no deletes
}

// known tells whether the instances are: without them all its nodes would look like
// nobody's.
func (g *providedGroup) known() bool { return !g.listed.IsZero() }

// NewProvided returns a Provided that asks nobody until Start; now may be nil for
// time.Now.
func NewProvided(source GroupSource, now func() time.Time) *Provided {
	if now == nil {
		now = time.Now
	}

	return &Provided{source: source, now: now, kicked: make(chan struct{}, 1), providers: map[string]*providerState{}}
}

// Start asks drivers until ctx ends.
func (p *Provided) Start(ctx context.Context) error {
	var asking sync.WaitGroup
	defer asking.Wait()
	busy := map[string]chan struct{}{} // one closed channel per provider that is not being asked
	for ctx.Err() == nil {
		providers := p.source.Providers()
		p.keep(providers)
		for _, provider := range providers {
			select {
			case <-busy[provider]:
			default:
				if busy[provider] != nil {
					continue // slow; the others do not wait for it
				}
			}
			done := make(chan struct{})
			busy[provider] = done
			asking.Go(func() {
				defer close(done)
				p.poll(ctx, provider, &asking)
			})
		}
		p.rest(ctx)
	}

	return nil
}

// NeedLeaderElection is false: any replica answers.
func (*Provided) NeedLeaderElection() bool { return false }

// rest waits until it is time to ask again.
func (p *Provided) rest(ctx context.Context) {
	for _, step := range []struct {
		d      time.Duration
		kicked chan struct{}
	}{{pollApart, nil}, {pollEvery - pollApart, p.kicked}} {
		timer := time.NewTimer(step.d)
		select {
		case <-timer.C:
		case <-step.kicked:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// kick has drivers asked soon.
func (p *Provided) kick() {
	select {
	case p.kicked <- struct{}{}:
	default:
	}
}

// keep forgets all other providers.
func (p *Provided) keep(providers []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.providers, func(provider string, _ *providerState) bool { return !slices.Contains(providers, provider) })
}

// of returns what is known of a provider, which may be nothing yet, or any more. p.mu
// is held.
func (p *Provided) of(provider string) *providerState {
	state := p.providers[provider]
	if state == nil {
		state = &providerState{groups: map[string]*providedGroup{}, asking: map[string]bool{}, turns: make(chan struct{}, askAtOnce)}
		p.providers[provider] = state
	}

	return state
}

// group returns a group as it is known by now; nil when it is not any more.
func (p *Provided) group(g *providedGroup) *providedGroup {
	p.mu.Lock()
	defer p.mu.Unlock()

	return p.of(g.provider).groups[g.id]
}

// wrote takes up a change that was made to a group as it was known before, and has it
// asked about soon. Changes run at the same time, and the one that is answered last
// need not have been the last: of deletes the lowest size is. sure is false where
// nobody can tell but the driver.
func (p *Provided) wrote(before *providedGroup, target int32, deleting []string) (after *providedGroup, sure bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	state := p.of(before.provider)
	last := cmp.Or(state.groups[before.id], before)
	now := *last
	now.writes++
	if deleting == nil {
		sure = last.writes == before.writes
		now.resizes++
		now.Target = target
	} else {
		sure = last.resizes == before.resizes
		now.Target = min(last.Target, target)
		now.instances = slices.Clone(last.instances)
	}
	for n, i := range now.instances {
		if slices.Contains(deleting, i.ID) {
			now.instances[n] = dispatch.NodeGroupInstance{ID: i.ID, State: dispatch.InstanceDeleting}
		}
	}
	state.writes++
	state.groups[before.id] = &now
	p.kick()

	return &now, sure
}

// isProvided tells groups of drivers from MachineDeployments.
func isProvided(id string) bool { return strings.HasPrefix(id, providerPrefix) }
