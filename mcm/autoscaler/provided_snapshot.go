package autoscaler

import (
	"cmp"
	"maps"
	"slices"

	"k8s.io/klog/v2"
)

// A providedSnapshot is the drivers' part of a snapshot. It is never changed.
type providedSnapshot struct {
	groups     []*providedGroup // by id
	byID       map[string]*providedGroup
	byInstance map[string]string // their ids, by those of their instances
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
	return sn.byID[sn.byInstance[cmp.Or(providerID, name)]]
}

// snapshot returns what the answers of one loop are taken from.
func (p *Provided) snapshot() *providedSnapshot {
	sn := &providedSnapshot{byID: map[string]*providedGroup{}, byInstance: map[string]string{}}
	if p == nil {
		return sn
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, state := range p.providers {
		for id, g := range state.groups {
			if g.known() && p.now().Sub(state.heard) <= providerGrace {
				sn.byID[id] = g
			}
		}
	}
	disputed := map[string]bool{}
	for _, id := range slices.Sorted(maps.Keys(sn.byID)) {
		g := sn.byID[id]
		sn.groups = append(sn.groups, g)
		for _, i := range g.instances {
			other := sn.byID[sn.byInstance[i.ID]]
			sn.byInstance[i.ID] = g.id
			if other == nil || other.provider == g.provider {
				continue
			}
			if disputed[i.ID] = true; !p.disputed[i.ID] {
				klog.Background().Info("two providers claim an instance: its node is taken for nobody's",
					"instance", i.ID, "nodeGroup", other.id, "and", g.id)
			}
		}
	}
	for id := range disputed {
		delete(sn.byInstance, id)
	}
	p.disputed = disputed

	return sn
}
