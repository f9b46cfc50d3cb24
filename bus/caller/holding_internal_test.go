package caller

import "testing"

// Of several replicas that have an operation, one that runs it comes before one that
// failed, whatever their attempts' numbers.
func TestHolding_Before(t *testing.T) {
	t.Parallel()
	order := []operationHolder{
		{replica: "runs the second", attempt: 2},
		{replica: "runs the first", attempt: 1},
		{replica: "failed the third", attempt: 3, failed: true},
		{replica: "fenced", attempt: 4, fenced: true},
	}
	for i, h := range order {
		for j, other := range order {
			if got := h.preferredTo(other); got != (i < j) {
				t.Errorf("%q before %q: %t", h.replica, other.replica, got)
			}
		}
	}
}
