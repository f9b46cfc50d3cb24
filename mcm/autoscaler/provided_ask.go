package autoscaler

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/machinebus/machinebus/mcm/dispatch"
)

// poll asks one provider for its groups, and has it asked about each. A group that
// is not answered for holds up a few others, for as long as one answer may take.
func (p *Provided) poll(ctx context.Context, provider string, asking *sync.WaitGroup) {
	groups := p.askGroups(ctx, provider)
	p.mu.Lock()
	defer p.mu.Unlock()
	state := p.of(provider)
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
		state := p.of(provider)
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
		var options error
		one.Options, options = soundOptions(g.Options)
		if err := cmp.Or(g.Err, joined([]error{options, g.TemplateErr})); err != nil {
			told[one.id] = err.Error()
			if state.told[one.id] != err.Error() {
				log.Info("a driver's node group breaks the contract", "nodeGroup", one.id, "left out", g.Err != nil, "err", err.Error())
			}
		}
		if g.Err != nil {
			continue
		}
		if last := state.groups[one.id]; last != nil {
			one.instances, one.listed, one.fault = last.instances, last.listed, last.fault
			one.writes, one.resizes = last.writes, last.resizes
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
	asked := p.now()
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
	log := klog.FromContext(ctx).WithValues("nodeGroup", g.id)
	switch {
	case err == nil:
		after.instances, after.listed = list, asked
		if last.fault != "" {
			log.Info("instances of a node group are told again")
		}
	case err.Error() != last.fault && !last.known():
		log.Info("instances of a node group are not told; it is left out until they are", "err", err.Error())
	case err.Error() != last.fault:
		log.Info("instances of a node group are not told; those known before count", "age", asked.Sub(last.listed).String(), "err", err.Error())
	}
	if err != nil {
		after.fault = err.Error()
	}
	state.groups[id] = &after
}
