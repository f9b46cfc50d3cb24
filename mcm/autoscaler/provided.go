package autoscaler

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

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
	known     bool   // instances are: without them all its nodes would look like nobody's
	fault     string // why they could not be had last
	writes    int    // ours, as in providerState
}

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
		for _, provider := range p.source.Providers() {
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

// poll asks one provider for its groups, and has it asked about each. A group that
// is not answered for holds up a few others, for as long as one answer may take.
func (p *Provided) poll(ctx context.Context, provider string, asking *sync.WaitGroup) {
	groups := p.askGroups(ctx, provider)
	p.mu.Lock()
	defer p.mu.Unlock()
	state := p.providers[provider]
	for _, id := range groups {
		if state.asking[id] {
			continue
		}
		state.asking[id] = true
		asking.Go(func() {
			state.turns <- struct{}{}
			p.askInstances(ctx, state, id)
			<-state.turns
		})
	}
}

// askGroups asks one provider for its groups, and once more if we changed something
// meanwhile.
func (p *Provided) askGroups(ctx context.Context, provider string) (ids []string) {
	asker := ctx
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	for ctx.Err() == nil {
		p.mu.Lock()
		state := p.providers[provider]
		if state == nil {
			state = &providerState{groups: map[string]*providedGroup{}, asking: map[string]bool{}, turns: make(chan struct{}, askAtOnce)}
			p.providers[provider] = state
		}
		before := state.writes
		p.mu.Unlock()
		asked := p.now()
		groups, err := p.source.Groups(ctx, provider)
		p.mu.Lock()
		switch {
		case err == nil && state.writes != before:
			p.mu.Unlock()

			continue
		case err != nil && asker.Err() != nil: // which says nothing of the driver
			p.mu.Unlock()

			return nil
		}
		ids := p.learn(ctx, provider, state, asked, groups, err)
		p.mu.Unlock()

		return ids
	}

	return nil
}

// learn takes up an answer, and returns which groups there are. p.mu is held.
func (p *Provided) learn(
	ctx context.Context, provider string, state *providerState, asked time.Time, groups []dispatch.NodeGroup, err error,
) (ids []string) {
	log := klog.FromContext(ctx).WithValues("provider", provider)
	if err != nil {
		if !state.away {
			log.Info("driver does not tell its node groups; what it last said counts for a while", "grace", providerGrace.String(), "err", err.Error())
		}
		state.away = true

		return nil
	}
	if state.away {
		log.Info("driver tells its node groups again")
	}
	state.heard, state.away = asked, false
	now := make(map[string]*providedGroup, len(groups))
	told := map[string]string{}
	for _, g := range groups {
		one := &providedGroup{NodeGroup: g, id: providerPrefix + provider + "/" + g.ID, provider: provider}
		var faulty error
		one.Options, faulty = soundOptions(g.Options)
		if err := cmp.Or(g.Err, faulty); err != nil {
			told[one.id] = err.Error()
			if state.told[one.id] != err.Error() {
				log.Info("a driver's node group breaks the contract", "nodeGroup", one.id, "left out", g.Err != nil, "err", err.Error())
			}
		}
		if g.Err != nil {
			continue
		}
		if last := state.groups[one.id]; last != nil {
			one.instances, one.known, one.fault, one.writes = last.instances, last.known, last.fault, last.writes
		}
		now[one.id] = one
	}
	state.groups, state.told = now, told

	return slices.Collect(maps.Keys(now))
}

// askInstances asks about one group. What cannot be told leaves it as it was.
func (p *Provided) askInstances(ctx context.Context, state *providerState, id string) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	p.mu.Lock()
	defer p.mu.Unlock()
	defer delete(state.asking, id)
	g := state.groups[id]
	if g == nil {
		return
	}
	p.mu.Unlock()
	list, err := p.source.Instances(ctx, g.provider, g.ID)
	p.mu.Lock()
	last := state.groups[id]
	switch {
	case last == nil, errors.Is(ctx.Err(), context.Canceled):
		return
	case last.writes != g.writes:
		p.kick() // the answer may be from before our write

		return
	}
	after := *last
	after.fault = ""
	if err != nil {
		after.fault = err.Error()
		if after.fault != last.fault {
			klog.FromContext(ctx).Info("instances of a node group are not known", "nodeGroup", g.id, "known before", last.known, "err", after.fault)
		}
	} else {
		after.instances, after.known = list, true
	}
	state.groups[id] = &after
}

// group returns a group as it is known; nil when it is not.
func (p *Provided) group(g *providedGroup) *providedGroup {
	p.mu.Lock()
	defer p.mu.Unlock()

	return p.providers[g.provider].groups[g.id]
}

// wrote has a change that was made seen at once, and asked about soon. Deletes run at
// the same time, and the one that is answered last need not have been the last.
func (p *Provided) wrote(g *providedGroup, target int32, deleting []string) *providedGroup {
	p.mu.Lock()
	defer p.mu.Unlock()
	state := p.providers[g.provider]
	last := cmp.Or(state.groups[g.id], g)
	after := *last
	after.writes++
	after.Target = target
	if deleting != nil {
		after.Target = min(last.Target, target)
		after.instances = slices.Clone(last.instances)
	}
	for n, i := range after.instances {
		if slices.Contains(deleting, i.ID) {
			after.instances[n] = dispatch.NodeGroupInstance{ID: i.ID, State: dispatch.InstanceDeleting}
		}
	}
	state.writes++
	state.groups[g.id] = &after
	p.kick()

	return &after
}

// isProvided tells groups of drivers from MachineDeployments.
func isProvided(id string) bool { return strings.HasPrefix(id, providerPrefix) }
