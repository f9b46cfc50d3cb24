package replica

import (
	"fmt"
	"sync"
	"testing"
)

func TestReadsKeepTheirOrder(t *testing.T) {
	t.Parallel()
	var r readQueue
	for i := range 3 {
		r.add(t.Context(), &operation{id: fmt.Sprint(i)})
	}
	for i := range 3 {
		if first, ok := r.next(); !ok || first.op.id != fmt.Sprint(i) {
			t.Errorf("read %d is %+v, %v: who came first is to be answered first", i, first.op, ok)
		}
	}
	if _, ok := r.next(); ok {
		t.Error("a read that was not added would run")
	}
}

func TestReadsAreTakenOnce(t *testing.T) {
	t.Parallel()
	const many = 1000
	var r readQueue
	var mu sync.Mutex
	taken := map[string]int{}
	var all sync.WaitGroup
	for i := range many {
		r.add(t.Context(), &operation{id: fmt.Sprint(i)})
		all.Go(func() {
			if read, ok := r.next(); ok {
				mu.Lock()
				defer mu.Unlock()
				taken[read.op.id]++
			}
		})
	}
	all.Wait()
	if len(taken) != many {
		t.Errorf("%d of %d reads were taken, each by one goroutine", len(taken), many)
	}
}
