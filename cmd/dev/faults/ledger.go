package main

import (
	"fmt"
	"slices"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// The kinds of damage.
const (
	lost    = "lost"
	doubled = "doubled"
	leaked  = "leaked"
	stuck   = "stuck"
)

// A finding is something that is wrong.
type finding struct {
	damage string
	of     string // the uid of a machine or another subject, for which it counts once
	n      int
	text   string
}

func foundf(damage, of string, n int, format string, args ...any) finding {
	return finding{damage: damage, of: of, n: n, text: fmt.Sprintf(format, args...)}
}

// total returns how much of each damage there is. Damage that was found several times
// for one subject counts once, with the largest number.
func total(found []finding) map[string]int {
	type once struct{ damage, of string }
	most := map[once]int{}
	for _, f := range found {
		key := once{f.damage, f.of}
		most[key] = max(most[key], f.n)
	}
	sum := map[string]int{}
	for key, n := range most {
		sum[key.damage] += n
	}
	return sum
}

// broken reports whether it is about an instance that must not have been created.
func (f finding) broken() bool { return f.damage == doubled || f.damage == leaked }

// A ledger sums up the cloud's log about one Machine's instances.
type ledger struct {
	uid      string
	name     string
	identity cloudapi.Identity
	made     int
	live     int
	late     []string // instances that were created or still existed after the Machine was gone
}

// figures count what was judged.
type figures struct {
	machines   int // machines that had instances
	strange    int // of these, machines that etcd has never stored
	lifecycles int // machines that have come and gone
	surplus    int // legitimate second instances that were collected
}

// readLog returns the findings in the cloud's log, which at the end are visible nowhere
// else because instances were replaced or collected.
func readLog(entries []cloudapi.LogEntry, w *witness) (found []finding, sums figures) {
	found, sums.surplus = doubles(entries)
	ledgers := map[string]*ledger{}
	var order []*ledger
	for _, e := range entries {
		created := e.Op == cloudapi.OpCreate && e.Event == cloudapi.EventCreated
		if !created && e.Event != cloudapi.EventDeleted {
			continue
		}
		l := ledgers[e.MachineUID]
		if l == nil {
			l = &ledger{uid: e.MachineUID, name: e.Name, identity: e.Identity}
			ledgers[e.MachineUID] = l
			order = append(order, l)
		}
		if created {
			l.made++
			l.live++
		} else {
			found = append(found, l.remove(e, w)...)
		}
		// After a removal by force instances are collected later, but none may be created.
		of, _ := w.lived(e.MachineUID)
		if (created || !of.forced) && w.tooLate(e.MachineUID, e.Time) && !slices.Contains(l.late, e.ID) {
			l.late = append(l.late, e.ID)
		}
	}
	for _, l := range order {
		found = append(found, l.leftBehind()...)
		of, seen := w.lived(l.uid)
		if !seen {
			sums.strange++
		}
		if l.live == 0 && of.ran {
			sums.lifecycles++
		}
	}
	sums.machines = len(order)
	return found, sums
}

// remove returns a finding if an instance was deleted although its machine was not: it is
// lost even if it was replaced.
func (l *ledger) remove(e cloudapi.LogEntry, w *witness) []finding {
	l.live--
	if l.live > 0 || w.allows(l.uid, e.Time) {
		return nil
	}
	return []finding{foundf(lost, l.uid, 1, "the instance of machine %s (%s) was deleted at %s, before the Machine", l.name, l.uid, e.Time)}
}

// leftBehind returns a finding if a Machine left instances behind, even if they were
// collected later. If nothing identifies creates there may be several instances, and all
// but one may be left.
func (l *ledger) leftBehind() []finding {
	n := len(l.late)
	if l.identity == cloudapi.IdentityNone {
		n -= l.made - 1
	}
	if n <= 0 {
		return nil
	}
	return []finding{foundf(leaked, l.uid, n, "machine %s (%s) was gone but had instances: %v", l.name, l.uid, l.late)}
}
