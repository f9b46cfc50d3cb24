package autoscaler

import (
	"context"
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
	// pollTimeout is for all groups of one provider.
	pollTimeout = 30 * time.Second
	// providerGrace is how long the last answer of a provider that is away counts: a
	// driver that is updated is missed by nobody. After it the provider's groups are
	// left out, so that the cluster-autoscaler asks others for nodes.
	providerGrace = time.Minute
)

// A GroupSource asks drivers; dispatch.NodeGroups is one.
type GroupSource interface {
	Providers() []string
	Groups(ctx context.Context, provider string) ([]dispatch.NodeGroup, error)
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
}

// A providerState is what is known of a provider. Groups are never changed, only
// replaced.
type providerState struct {
	groups map[string]*providedGroup // by the gateway's id
	heard  time.Time
	writes int // ours; an answer from before one of them is old
	away   bool
}

// A providedGroup is a group that a driver serves.
type providedGroup struct {
	dispatch.NodeGroup

	id       string // the gateway's
	provider string
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
				p.poll(ctx, provider)
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

// poll asks one provider, and once more if we changed something meanwhile.
func (p *Provided) poll(ctx context.Context, provider string) {
	ctx, cancel := context.WithTimeout(ctx, pollTimeout)
	defer cancel()
	for ctx.Err() == nil {
		p.mu.Lock()
		state := p.providers[provider]
		if state == nil {
			state = &providerState{groups: map[string]*providedGroup{}}
			p.providers[provider] = state
		}
		before := state.writes
		p.mu.Unlock()
		asked := p.now()
		groups, err := p.source.Groups(ctx, provider)
		p.mu.Lock()
		if err == nil && state.writes != before {
			p.mu.Unlock()

			continue
		}
		p.learn(ctx, provider, state, asked, groups, err)
		p.mu.Unlock()

		return
	}
}

// learn takes up an answer. p.mu is held.
func (p *Provided) learn(
	ctx context.Context, provider string, state *providerState, asked time.Time, groups []dispatch.NodeGroup, err error,
) {
	log := klog.FromContext(ctx).WithValues("provider", provider)
	if err != nil {
		if !state.away && ctx.Err() == nil {
			log.Info("driver does not tell its node groups; what it last said counts for a while", "grace", providerGrace.String(), "err", err.Error())
		}
		state.away = true

		return
	}
	if state.away {
		log.Info("driver tells its node groups again")
	}
	state.heard, state.away = asked, false
	now := make(map[string]*providedGroup, len(groups))
	for _, g := range groups {
		one := &providedGroup{NodeGroup: g, id: providerPrefix + provider + "/" + g.ID, provider: provider}
		if g.InstancesErr != nil {
			last := state.groups[one.id]
			log.Info("instances of a node group are not known", "nodeGroup", one.id, "known before", last != nil, "err", g.InstancesErr.Error())
			if last == nil {
				continue // without its instances all its nodes would look like nobody's
			}
			one.Instances = last.Instances
		}
		now[one.id] = one
	}
	state.groups = now
}

// snapshot returns what the answers of one loop are taken from.
func (p *Provided) snapshot() *providedSnapshot {
	sn := &providedSnapshot{byID: map[string]*providedGroup{}, byInstance: map[string]*providedGroup{}}
	if p == nil {
		return sn
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, state := range p.providers {
		if p.now().Sub(state.heard) <= providerGrace {
			maps.Copy(sn.byID, state.groups)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(sn.byID)) {
		g := sn.byID[id]
		sn.groups = append(sn.groups, g)
		for _, i := range g.Instances {
			sn.byInstance[i.ID] = g
		}
	}

	return sn
}

// wrote has a change that was made seen at once, and asked about soon.
func (p *Provided) wrote(g *providedGroup, target int32, deleting []string) *providedGroup {
	after := *g
	after.Target = target
	after.Instances = slices.Clone(g.Instances)
	for n, i := range after.Instances {
		if slices.Contains(deleting, i.ID) {
			after.Instances[n] = dispatch.NodeGroupInstance{ID: i.ID, State: dispatch.InstanceDeleting}
		}
	}
	p.mu.Lock()
	if state := p.providers[g.provider]; state != nil {
		state.writes++
		state.groups = maps.Clone(state.groups)
		state.groups[g.id] = &after
	}
	p.mu.Unlock()
	p.kick()

	return &after
}

// A providedSnapshot is the drivers' part of a snapshot. It is never changed.
type providedSnapshot struct {
	groups     []*providedGroup // by id
	byID       map[string]*providedGroup
	byInstance map[string]*providedGroup // by the ids of their instances
}

// with returns a snapshot with one group replaced.
func (sn *providedSnapshot) with(g *providedGroup) *providedSnapshot {
	out := &providedSnapshot{groups: slices.Clone(sn.groups), byID: maps.Clone(sn.byID), byInstance: sn.byInstance}
	if i := slices.IndexFunc(out.groups, func(o *providedGroup) bool { return o.id == g.id }); i >= 0 {
		out.groups[i], out.byID[g.id] = g, g
	}

	return out
}

// find returns the group of a node; one that has not joined goes by its instance's
// id, in both fields. Whose a node is not stands in here as well: nobody is asked.
func (sn *providedSnapshot) find(providerID, name string) *providedGroup {
	if providerID != "" {
		return sn.byInstance[providerID]
	}

	return sn.byInstance[name]
}

// isProvided tells groups of drivers from MachineDeployments.
func isProvided(id string) bool { return strings.HasPrefix(id, providerPrefix) }
