package main

import (
	"fmt"
	"slices"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// The kinds of damage that a run can come to.
const (
	lost    = "lost"
	doubled = "doubled"
	leaked  = "leaked"
	stuck   = "stuck"
)

// A finding is something that is wrong.
type finding struct {
	damage string
	of     string // the uid of a machine, or what else it is about: it counts once for that
	n      int
	text   string
}

func foundf(damage, of string, n int, format string, args ...any) finding {
	return finding{damage: damage, of: of, n: n, text: fmt.Sprintf(format, args...)}
}

// total is how much of each damage there is. What was found of a machine again, or by
// another way, is the same damage; where it is a number, the largest counts.
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

// broken tells whether it is an instance that must not have been made.
func (f finding) broken() bool { return f.damage == doubled || f.damage == leaked }

// A ledger is what the cloud's log tells of one Machine's instances.
type ledger struct {
	uid      string
	name     string
	identity cloudapi.Identity
	made     int
	live     int
	late     []string // instances that were made or still there when the Machine was gone
}

// figures are how much there was to judge.
type figures struct {
	machines   int // that had instances
	strange    int // of these, that etcd has never stored
	lifecycles int // machines that have come and gone
	surplus    int // instances beside another one of their machine, as may be, and collected
}

// readLog returns what the cloud's log tells that nobody sees in the end, because it
// was replaced or collected.
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
		// What was left behind by force is collected later, and nothing made.
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

// remove finds an instance that was deleted although its machine was not to go: it is
// lost, whatever has replaced it.
func (l *ledger) remove(e cloudapi.LogEntry, w *witness) []finding {
	l.live--
	if l.live > 0 || w.allows(l.uid, e.Time) {
		return nil
	}
	return []finding{foundf(lost, l.uid, 1, "the instance of machine %s (%s) was deleted at %s, before the Machine was to go", l.name, l.uid, e.Time)}
}

// leftBehind finds instances that a Machine has left behind, although they were
// collected later. Where nothing tells creates apart there may be more than one, and
// all but one may go so.
func (l *ledger) leftBehind() []finding {
	n := len(l.late)
	if l.identity == cloudapi.IdentityNone {
		n -= l.made - 1
	}
	if n <= 0 {
		return nil
	}
	return []finding{foundf(leaked, l.uid, n, "machine %s (%s) was gone and had instances: %v", l.name, l.uid, l.late)}
}
