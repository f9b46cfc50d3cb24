package dispatch

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A bench drives a queue with a clock of its own.
type bench struct {
	*queue

	clock  time.Time
	timers map[time.Time][]func()
	look   func() // after each timer
}

func newBench(limits Limits) *bench {
	b := &bench{queue: newQueue(limits), clock: time.Unix(1e9, 0), timers: map[time.Time][]func(){}, look: func() {}}
	b.now = func() time.Time { return b.clock }
	b.after = func(d time.Duration, f func()) {
		at := b.clock.Add(d)
		b.timers[at] = append(b.timers[at], f)
	}

	return b
}

// pass lets time pass, and timers go off when they are due.
func (b *bench) pass(d time.Duration) {
	end := b.clock.Add(d)
	for {
		next := end
		for at := range b.timers {
			if at.Before(next) {
				next = at
			}
		}
		b.clock = next
		due := b.timers[next]
		delete(b.timers, next)
		for _, f := range due {
			f()
			b.look()
		}
		if len(due) == 0 && next.Equal(end) {
			return
		}
	}
}

func (b *bench) add(owner string, kind Kind) *turn {
	t := &turn{provider: "virtual", secret: "ns/cloud", owner: owner, kind: kind}
	b.enter(t, false)

	return t
}

func TestLimits(t *testing.T) {
	t.Parallel()
	type asked struct {
		provider, secret string
		kind             Kind
	}
	create := asked{"virtual", "a", Create}
	cases := map[string]struct {
		reason  string
		limits  Limits
		running []asked
		then    asked
		why     string // "" means that it does not wait
	}{
		"none": {"no limit, no wait", Limits{}, []asked{create, create, create}, create, ""},
		"provider in flight": {
			"the limit is reached",
			Limits{Provider: Limit{InFlight: 2}},
			[]asked{create, create},
			create,
			"operations in flight (create) of provider virtual: 2",
		},
		"other provider": {
			"providers have nothing to do with each other",
			Limits{Provider: Limit{InFlight: 1}},
			[]asked{create},
			asked{"metal", "a", Create},
			"",
		},
		"delete among creates": {
			"deletes have a limit of their own",
			Limits{Provider: Limit{InFlight: 1}, Secret: Limit{InFlight: 1}},
			[]asked{create},
			asked{"virtual", "a", Delete},
			"",
		},
		"initialize among creates": {
			"what exists is not held up by what does not",
			Limits{Provider: Limit{InFlight: 1}},
			[]asked{create},
			asked{"virtual", "a", Initialize},
			"",
		},
		"secret in flight": {
			"the limit is reached",
			Limits{Secret: Limit{InFlight: 1}},
			[]asked{create},
			create,
			"operations in flight (create) of secret a: 1, the limit of --secret-max-in-flight; the next one starts when one ends",
		},
		"other secret": {
			"secrets have nothing to do with each other",
			Limits{Secret: Limit{InFlight: 1}},
			[]asked{create},
			asked{"virtual", "b", Create},
			"",
		},
		"no secret": {
			"classes without one have none in common",
			Limits{Secret: Limit{InFlight: 1}},
			[]asked{{"virtual", "", Create}},
			asked{"virtual", "", Create},
			"",
		},
		"provider rate": {
			"the second's worth is used up, by whatever kind",
			Limits{Provider: Limit{PerSecond: 2}},
			[]asked{create, create},
			asked{"virtual", "b", Delete},
			"operations of provider virtual that start each second: 2, the limit of --provider-max-per-second",
		},
		"secret rate": {
			"the second's worth is used up",
			Limits{Secret: Limit{PerSecond: 1}},
			[]asked{create},
			asked{"virtual", "a", Delete},
			"operations of secret a that start each second: 1, the limit of --secret-max-per-second",
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(tc.limits)
			ask := func(a asked) *turn {
				turn := &turn{provider: a.provider, secret: a.secret, owner: "o", kind: a.kind}
				b.enter(turn, false)

				return turn
			}
			for _, a := range tc.running {
				if !ask(a).running {
					t.Fatalf("%+v has to wait", a)
				}
			}
			turn := ask(tc.then)
			if turn.running != (tc.why == "") {
				t.Errorf("running = %v: %s", turn.running, tc.reason)
			}
			if tc.why != "" && !strings.Contains(b.reason(turn), tc.why) {
				t.Errorf("it waits because %q, want %q", b.reason(turn), tc.why)
			}
		})
	}
}

// Of what waits, deployments and kinds of operation take turns, and who came
// first of one deployment goes first.
func TestOrder(t *testing.T) {
	t.Parallel()
	b := newBench(Limits{Provider: Limit{PerSecond: 1}})
	b.add("first", Create)
	var turns []*turn
	for _, w := range []struct {
		owner string
		kind  Kind
	}{
		{"big", Create},
		{"big", Create},
		{"big", Create},
		{"big", Create},
		{"small", Create},
		{"small", Create},
		{"big", Delete},
		{"big", Delete},
		{"small", Delete},
		{"small", Initialize},
	} {
		turns = append(turns, b.add(w.owner, w.kind))
	}
	var order []string
	for range turns {
		b.pass(time.Second + 2*time.Millisecond)
		for i, turn := range turns {
			if turn != nil && turn.running {
				order = append(order, fmt.Sprintf("%s %s %d", turn.kind, turn.owner, i))
				turns[i] = nil
			}
		}
	}
	want := []string{
		"delete big 6", "initialize small 9", "create big 0", "delete small 8", "create small 4", "delete big 7",
		"create big 1", "create small 5", "create big 2", "create big 3",
	}
	if diff := cmp.Diff(want, order); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

// What the drivers had no room for goes first when there is room again, and no
// more than there is room for.
func TestRefused(t *testing.T) {
	t.Parallel()
	b := newBench(Limits{})
	first, second := b.add("o", Create), b.add("o", Create)
	if !b.putBack(first, "all are busy") || b.putBack(second, "all are busy") {
		t.Error("only the first refusal is news")
	}
	third := b.add("o", Create)
	if third.running || b.reason(third) != "all are busy" {
		t.Errorf("running = %v, waits because %q, want it to wait like those before", third.running, b.reason(third))
	}
	if !b.refill("virtual", spare{1, 1}, true) || !first.running || second.running || third.running {
		t.Errorf("room for one: running are %v %v %v", first.running, second.running, third.running)
	}
	b.leave(first) // and its slot is free
	if !second.running || third.running {
		t.Errorf("one has ended: running are %v %v", second.running, third.running)
	}
	if b.refill("virtual", spare{7, 7}, true) || !third.running {
		t.Errorf("room for all: running = %v", third.running)
	}
	if fourth := b.add("o", Create); !fourth.running {
		t.Error("no operation was refused since there was room for all, and a new one waits")
	}
}

// That the drivers have no room for creates keeps no delete waiting, and the other way
// round.
func TestRefusedKinds(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ full, free Kind }{"creates": {Create, Delete}, "deletes": {Delete, Initialize}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(Limits{})
			b.putBack(b.add("o", tc.full), "all are busy")
			if waits, goes := b.add("o", tc.full), b.add("o", tc.free); waits.running || !goes.running {
				t.Errorf("%s running: %v, %s running: %v; want one to wait and the other to go", tc.full, waits.running, tc.free, goes.running)
			}
			n := spare{5, 5}
			n[slotsOf(tc.full)] = 0
			if !b.refill("virtual", n, true) {
				t.Error("nothing waits any more, without room")
			}
		})
	}
}

// A driver that does not say what room it has is found out by ever more
// operations.
func TestProbe(t *testing.T) {
	t.Parallel()
	b := newBench(Limits{})
	turns := []*turn{b.add("o", Create)}
	b.putBack(turns[0], "no driver")
	for range 99 {
		turns = append(turns, b.add("o", Create))
	}
	running := func() (n int) {
		for _, turn := range turns {
			if turn.running {
				n++
			}
		}

		return n
	}
	b.refill("virtual", spare{0, 0}, false)
	if n := running(); n != 1 {
		t.Fatalf("%d are sent to find out, want 1", n)
	}
	b.putBack(turns[0], "no driver")
	rounds := 0
	for b.refill("virtual", spare{0, 0}, false) {
		rounds++
		if rounds > 10 {
			t.Fatalf("after %d rounds %d of %d are sent", rounds, running(), len(turns))
		}
	}
	if n := running(); n != len(turns) {
		t.Errorf("%d of %d are sent", n, len(turns))
	}
}

func TestSecretsAreForgotten(t *testing.T) {
	t.Parallel()
	b := newBench(Limits{Secret: Limit{InFlight: 1, PerSecond: 1}})
	for i := range 1000 {
		turn := &turn{provider: "virtual", secret: fmt.Sprint(i), owner: "o", kind: Create}
		b.enter(turn, false)
		b.leave(turn)
		b.pass(time.Second)
	}
	if n := len(b.secrets); n > 2*minSweep {
		t.Errorf("%d secrets are remembered of which none is in use", n)
	}
}

func TestOwnerOf(t *testing.T) {
	t.Parallel()
	set := []metav1.OwnerReference{{Kind: "MachineSet", Name: "pool-123", Controller: new(true)}}
	cases := map[string]struct {
		reason, hash string
		owners       []metav1.OwnerReference
		want         string
	}{
		"deployment": {"all sets of a deployment are one owner", "123", set, "shop/pool"},
		"set":        {"it has no deployment", "", set, "shop/pool-123"},
		"other hash": {"not what the name ends with", "456", set, "shop/pool-123"},
		"none":       {"or many single machines would get a share each", "", nil, "shop/class/small"},
	}
	for name, tc := range cases {
		m := &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", OwnerReferences: tc.owners}}
		m.Spec.Class.Name = "small"
		if tc.hash != "" {
			m.Labels = map[string]string{v1alpha1.LabelKeyMachineTemplateHash: tc.hash}
		}
		if got := ownerOf(m); got != tc.want {
			t.Errorf("%s: owner is %q, want %q: %s", name, got, tc.want, tc.reason)
		}
	}
}

// TestFairShare: as long as two deployments both wait, neither gets ahead of the
// other by more than one operation, whatever their sizes and in whatever order
// operations end.
func TestFairShare(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := newBench(Limits{Provider: Limit{InFlight: rapid.IntRange(1, 5).Draw(t, "limit")}})
		var turns []*turn
		for o := range rapid.IntRange(2, 5).Draw(t, "owners") {
			for range rapid.IntRange(1, 30).Draw(t, "machines") {
				turns = append(turns, b.add(fmt.Sprint(o), Create))
			}
		}
		got, waiting := map[string]int{}, map[string]int{}
		seen := map[*turn]bool{}
		look := func() (running []*turn) {
			clear(waiting)
			for _, turn := range turns {
				switch {
				case !turn.running:
					waiting[turn.owner]++
				case !seen[turn]:
					seen[turn] = true
					got[turn.owner]++
				}
				if turn.running {
					running = append(running, turn)
				}
			}

			return running
		}
		look()
		clear(got) // the first came alone
		for {
			running := look()
			for a := range waiting {
				for o := range waiting {
					if got[a]-got[o] > 1 {
						t.Fatalf("owner %s got %d and owner %s %d of what both wait for", a, got[a], o, got[o])
					}
				}
			}
			if len(running) == 0 {
				break
			}
			ended := rapid.SampledFrom(running).Draw(t, "ended")
			b.leave(ended)
			turns = without(turns, ended)
		}
		if len(turns) > 0 {
			t.Fatalf("%d were never granted", len(turns))
		}
	})
}

func without(turns []*turn, gone *turn) []*turn {
	var rest []*turn
	for _, turn := range turns {
		if turn != gone {
			rest = append(rest, turn)
		}
	}

	return rest
}

// What waits behind an operation of its owner goes when that one is let go out of turn.
func TestQueue_SkipLetsTheNextGo(t *testing.T) {
	t.Parallel()
	b := newBench(Limits{Secret: Limit{InFlight: 1}})
	begun := &turn{provider: "p", secret: "s", owner: "a", kind: Create}
	ahead := &turn{provider: "p", secret: "s", owner: "a", kind: Create}
	behind := &turn{provider: "p", secret: "t", owner: "a", kind: Create}
	for _, turn := range []*turn{begun, ahead, behind} {
		b.enter(turn, false)
	}
	if !begun.running || ahead.running || behind.running {
		t.Fatalf("running: %t, %t, %t; want the first alone", begun.running, ahead.running, behind.running)
	}
	b.bypass(ahead)
	if !behind.running {
		t.Error("what waited behind an operation that was let go still waits")
	}
}
