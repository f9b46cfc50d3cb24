package orphans

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/dispatch"
)

// endLostDeletes ends the deletes that failed for mcm and had their effect all the same:
// the driver replica died, or NATS was away. Their instances are listed no more, so no
// further delete would remove their Nodes, and no machine of the same name could join.
// A manager that starts in between does not know of them.
func (p *pass) endLostDeletes(ctx context.Context) {
	for k, o := range p.failed {
		l := p.listOf(o)
		switch {
		case l == nil: // not listed by this pass
		case l.lists(k.providerID):
			delete(p.failed, k) // it is there: another delete ends it, or a machine has it
		default:
			delete(p.failed, k)
			p.endDelete(ctx, o, true)
		}
	}
}

// listOf returns this pass's trustworthy list of an orphan's class, or nil.
func (p *pass) listOf(o *dispatch.Orphan) *listing {
	class := client.ObjectKeyFromObject(o.Class.Object)
	for i := range p.lists {
		l := &p.lists[i]
		if l.provider == o.Provider && !l.doubtful && client.ObjectKeyFromObject(l.class.Object) == class {
			return l
		}
	}

	return nil
}

// lists reports whether an instance is listed.
func (l *listing) lists(providerID string) bool {
	for i := range l.instances {
		if l.instances[i].ProviderID == providerID {
			return true
		}
	}

	return false
}
