package dispatch

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// TestQueueModel does to a queue whatever may happen, in any order, and holds
// after each step: no limit is exceeded, nothing waits that may go, an owner's
// operations keep their order; and in the end, nothing has starved.
func TestQueueModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := &model{
			bench:   newBench(Limits{Provider: drawLimit(t, "provider"), Secret: drawLimit(t, "secret")}),
			granted: map[*turn]bool{}, again: map[*turn]bool{}, begun: map[string][]time.Time{},
		}
		m.look = func() { m.noteGrants(t) }
		t.Repeat(map[string]func(*rapid.T){
			"":       m.check,
			"enter":  m.enterOne,
			"end":    func(t *rapid.T) { m.drop(t, true) },
			"cancel": func(t *rapid.T) { m.drop(t, false) },
			"refuse": m.refuseOne,
			"first":  m.putFirst,
			"skip":   m.skipOne,
			"refill": func(t *rapid.T) {
				m.refill(rapid.SampledFrom(modelProviders).Draw(t, "provider"),
					spare{rapid.IntRange(0, 3).Draw(t, "spare"), rapid.IntRange(0, 3).Draw(t, "for deletes")},
					rapid.Bool().Draw(t, "known"))
			},
			"pass": func(t *rapid.T) { m.pass(time.Duration(rapid.IntRange(1, 2000).Draw(t, "ms")) * time.Millisecond) },
		})
		m.finish(t)
	})
}

var modelProviders = []string{"p", "q"}

func drawLimit(t *rapid.T, what string) Limit {
	return Limit{
		InFlight:  rapid.IntRange(0, 3).Draw(t, what+" in flight"),
		PerSecond: rapid.SampledFrom([]float64{0, 0.5, 1, 3}).Draw(t, what+" per second"),
	}
}

// A model is a queue and what is known of it from outside.
type model struct {
	*bench

	turns   []*turn // those that have not left
	granted map[*turn]bool
	again   map[*turn]bool
	begun   map[string][]time.Time // by provider, and by provider and secret
}

func (m *model) enterOne(t *rapid.T) {
	turn := &turn{
		provider: rapid.SampledFrom(modelProviders).Draw(t, "provider"),
		secret:   rapid.SampledFrom([]string{"s", "t"}).Draw(t, "secret"),
		owner:    rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "owner"),
		kind:     rapid.SampledFrom(lanes).Draw(t, "kind"),
	}
	m.again[turn] = rapid.IntRange(0, 9).Draw(t, "again") == 0
	m.turns = append(m.turns, turn)
	m.enter(turn, m.again[turn])
}

// choose draws one that fits.
func (m *model) choose(t *rapid.T, fits func(*turn) bool) *turn {
	var fit []*turn
	for _, turn := range m.turns {
		if fits(turn) {
			fit = append(fit, turn)
		}
	}
	if len(fit) == 0 {
		t.Skip("there is none") // rapid draws another step then; no test is skipped
	}

	return rapid.SampledFrom(fit).Draw(t, "turn")
}

func (m *model) drop(t *rapid.T, running bool) {
	turn := m.choose(t, func(o *turn) bool { return o.running == running })
	m.leave(turn)
	m.turns = without(m.turns, turn)
}

func (m *model) refuseOne(t *rapid.T) {
	turn := m.choose(t, func(o *turn) bool { return o.running && !m.again[o] })
	m.putBack(turn, "all are busy")
	m.granted[turn] = false
}

// putFirst: what was taken up is at no driver any more.
func (m *model) putFirst(t *rapid.T) {
	turn := m.choose(t, func(o *turn) bool { return o.running && m.again[o] })
	m.again[turn], m.granted[turn] = false, false
	m.enterFirst(turn)
}

// skipOne: one that waits is given up, and only to be asked about.
func (m *model) skipOne(t *rapid.T) {
	turn := m.choose(t, func(o *turn) bool { return !o.running })
	m.again[turn], m.granted[turn] = true, true
	m.bypass(turn)
}

func (m *model) check(t *rapid.T) {
	m.noteGrants(t)
	for _, turn := range m.turns {
		if turn.running || m.lines[turn.provider].slotsOf(turn.kind).full {
			continue
		}
		m.checkReason(t, turn)
	}
}

// noteGrants looks at what was granted since it last looked.
func (m *model) noteGrants(t *rapid.T) {
	for _, next := range m.turns {
		if !next.running || m.granted[next] {
			continue
		}
		m.granted[next] = true
		if m.again[next] {
			continue // resumed
		}
		m.checkOrder(t, next)
		m.checkLimit(t, m.limits.Provider, next.kind, next.provider, func(o *turn) bool { return o.provider == next.provider })
		m.checkLimit(t, m.limits.Secret, next.kind, next.provider+next.secret, func(o *turn) bool {
			return o.provider == next.provider && o.secret == next.secret
		})
	}
}

// checkOrder: what was granted goes before the later ones of its owner.
func (m *model) checkOrder(t *rapid.T, granted *turn) {
	for _, o := range m.turns {
		if !o.running && o.number < granted.number &&
			o.provider == granted.provider && o.kind == granted.kind && o.owner == granted.owner {
			t.Fatalf("number %d of an owner goes before number %d", granted.number, o.number)
		}
	}
}

// checkLimit holds what one limit counts, after a grant, against that limit.
func (m *model) checkLimit(t *rapid.T, limit Limit, kind Kind, key string, counts func(*turn) bool) {
	running := 0
	for _, o := range m.turns {
		if o.running && o.kind == kind && counts(o) {
			running++
		}
	}
	if limit.InFlight > 0 && running > limit.InFlight {
		t.Fatalf("%d operations %s of %s run, the limit is %d", running, kind, key, limit.InFlight)
	}
	if limit.PerSecond == 0 {
		return
	}
	m.begun[key] = append(m.begun[key], m.clock)
	times := m.begun[key]
	for i, first := range times {
		passed := m.clock.Sub(first)
		most := limit.PerSecond*passed.Seconds() + math.Max(1, math.Ceil(limit.PerSecond))
		if n := len(times) - i; float64(n) > most+0.01 {
			t.Fatalf("%d operations of %s began within %s, the limit is %g a second", n, key, passed, limit.PerSecond)
		}
	}
}

// checkReason: an operation waits for a limit, or behind another one of its owner that does;
// and if only time must pass, a timer is set.
func (m *model) checkReason(t *rapid.T, waiting *turn) {
	first := waiting
	for _, o := range m.turns {
		if !o.running && o.number < first.number &&
			o.provider == first.provider && o.kind == first.kind && o.owner == first.owner {
			first = o
		}
	}
	l, s := m.lines[first.provider], m.secret(first)
	if !l.room(first.kind) || !s.room(first.kind) {
		return
	}
	const rounding = 2 * time.Millisecond
	if before := m.clock.Add(-rounding); l.delay(before) == 0 && s.delay(before) == 0 {
		t.Fatalf("%+v waits and may go", *first)
	}
	if l.delay(m.clock) == 0 && s.delay(m.clock) == 0 {
		return // a timer is due
	}
	if l.wakeAt.IsZero() || m.timers[l.wakeAt] == nil {
		t.Fatalf("%+v waits for time to pass, and no timer runs", *first)
	}
}

// finish lets everything end: nothing may be left.
func (m *model) finish(t *rapid.T) {
	for range 1000 {
		for _, provider := range modelProviders {
			m.refill(provider, spare{1, 1}, true)
		}
		m.noteGrants(t)
		m.pass(time.Second)
		m.noteGrants(t)
		left := m.turns
		for _, turn := range left {
			if turn.running {
				m.leave(turn)
				m.turns = without(m.turns, turn)
			}
		}
		if len(m.turns) == 0 {
			break
		}
	}
	if len(m.turns) > 0 {
		t.Fatalf("%d operations starve, such as %+v", len(m.turns), *m.turns[0])
	}
	for _, l := range m.lines {
		if len(l.inFlight) > 0 {
			t.Fatalf("nothing is left, but counted are %v", l.inFlight)
		}
	}
}
