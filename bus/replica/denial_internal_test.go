package replica

import (
	"testing"
	"time"
)

func TestDenials(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	d := denials{}
	d.add("c/op", 2, now)
	d.add("c/op", 1, now) // a question that was late
	for reason, tc := range map[string]struct {
		attempt uint32
		after   time.Duration
		want    bool
	}{
		"an earlier attempt":      {1, 0, true},
		"the denied attempt":      {2, denialKept, true},
		"the next attempt":        {3, 0, false},
		"after any accept_by":     {2, denialKept + 1, false},
		"an attempt long passed":  {1, time.Hour, false},
		"the next, a while later": {3, time.Second, false},
	} {
		op := &operation{cluster: "c", id: "op", attempt: tc.attempt, started: now.Add(tc.after)}
		if got := d.covers(op); got != tc.want {
			t.Errorf("%s: covered = %v, want %v", reason, got, tc.want)
		}
	}
	d.add("c/other", 1, now.Add(denialKept+1))
	if len(d) != 1 {
		t.Errorf("%d denials are kept, want only the one that still counts", len(d))
	}
}
