package main

import (
	"math/rand/v2"
	"sync"
	"time"
)

// An event is one fault to make. All its random values are drawn at once, so that a seed
// always means the same faults in the same order.
type event struct {
	kind   string
	gap    time.Duration // pause before it
	length time.Duration
	pick   int // selects the target
	way    int // selects the variant
}

// A plan draws an endless sequence of events. It is safe for concurrent use.
type plan struct {
	mu      sync.Mutex
	rand    *rand.Rand
	kinds   []string
	deck    []string
	longest time.Duration
}

func newPlan(seed uint64, kinds []string, longest time.Duration) *plan {
	return &plan{rand: rand.New(rand.NewPCG(seed, 0)), kinds: kinds, longest: longest}
}

// next draws the kinds like cards: each comes once before any comes again.
func (p *plan) next() event {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.deck) == 0 {
		for _, i := range p.rand.Perm(len(p.kinds)) {
			p.deck = append(p.deck, p.kinds[i])
		}
	}
	e := event{
		kind: p.deck[0], pick: p.rand.IntN(1 << 20), way: p.rand.IntN(1 << 20),
		gap:    time.Duration(p.rand.Int64N(int64(time.Second))),
		length: p.length(),
	}
	p.deck = p.deck[1:]
	return e
}

// length is mostly a few seconds, about as long as replicas may be silent, and sometimes
// anything up to the longest.
func (p *plan) length() time.Duration {
	const least, usual, rare = time.Second, 4 * time.Second, 8
	most := min(usual, p.longest)
	if p.rand.IntN(rare) == 0 {
		most = p.longest
	}
	return least + time.Duration(p.rand.Int64N(int64(most-least)+1))
}
