package cloud

import (
	"net/http"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

func TestFaults(t *testing.T) {
	t.Parallel()
	const lost = "no answer"
	tests := map[string]struct {
		reason string
		fault  cloudapi.Fault
		want   []string // how three creates of one name end
		events []string
		live   int
	}{
		"next": {
			reason: "the rule is used up after two calls",
			fault:  cloudapi.Fault{Operation: "create", Next: 2, Status: 503, Code: "Busy"},
			want:   []string{"Busy", "Busy", "OK"},
			events: []string{"create fault Busy", "create fault Busy", "create begin", "create created"},
			live:   1,
		},
		"by name": {
			reason: "the rule is for another name",
			fault:  cloudapi.Fault{Operation: "*", Name: "other-*"},
			want:   []string{"OK", "OK", "OK"},
			events: []string{"create begin", "create created", "create begin", "create created", "create begin", "create created"},
			live:   3,
		},
		"certain": {
			reason: "probability 1 always applies, and the defaults are an internal error",
			fault:  cloudapi.Fault{Operation: "create", Name: "m*", Probability: 1},
			want:   []string{"Internal", "Internal", "Internal"},
			events: []string{"create fault Internal", "create fault Internal", "create fault Internal"},
		},
		"dropped before": {
			reason: "the connection ends and nothing was done",
			fault:  cloudapi.Fault{Operation: "create", Next: 3, Drop: true},
			want:   []string{lost, lost, lost},
			events: []string{"create fault dropped", "create fault dropped", "create fault dropped"},
		},
		"dropped after": {
			reason: "the connection ends after the instance was made",
			fault:  cloudapi.Fault{Operation: "create", Next: 1, After: true, Drop: true},
			want:   []string{lost, "OK", "OK"},
			events: []string{
				"create begin", "create created", "create fault dropped",
				"create begin", "create created", "create begin", "create created",
			},
			live: 3,
		},
		"failed after": {
			reason: "the answer is an error although the instance was made",
			fault:  cloudapi.Fault{Operation: "create", Next: 1, After: true, Status: 504, Code: "Timeout"},
			want:   []string{"Timeout", "OK", "OK"},
			events: []string{
				"create begin", "create created", "create fault Timeout",
				"create begin", "create created", "create begin", "create created",
			},
			live: 3,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, Options{Knobs: cloudapi.Knobs{BootDelay: hour}})
			b.patch(t, cloudapi.KnobsPatch{Faults: &[]cloudapi.Fault{tc.fault}})
			var got []string
			for range 3 {
				_, err := b.client.Create(t.Context(), machine("m"))
				code := codeOf(err)
				if err != nil && cloudapi.CodeOf(err) == "" {
					code = lost
				}
				got = append(got, code)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("%s: codes (-want +got):\n%s", tc.reason, diff)
			}
			if diff := cmp.Diff(tc.events, b.events(t)[1:]); diff != "" { // the first is the patch
				t.Errorf("%s: log (-want +got):\n%s", tc.reason, diff)
			}
			if live := b.cloud.Stats().Live; live != tc.live {
				t.Errorf("%s: %d live instances, want %d", tc.reason, live, tc.live)
			}
		})
	}
}

func TestFaultsOfOtherOperations(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})
	i := b.mustCreate(t, machine("m"))
	calls := map[string]func() error{
		cloudapi.OpGet:        func() error { _, err := b.client.Get(t.Context(), i.ID); return err },
		cloudapi.OpList:       func() error { _, err := b.client.List(t.Context(), cloudapi.Filter{}); return err },
		cloudapi.OpInitialize: func() error { _, err := b.client.Initialize(t.Context(), i.ID); return err },
		cloudapi.OpDelete:     func() error { return b.client.Delete(t.Context(), i.ID) },
	}
	for op, call := range calls {
		fault := cloudapi.Fault{
			Operation: op, Next: 1, Status: 429, Code: "Slow", Message: "why", RetryAfter: cloudapi.Duration(1500 * time.Millisecond),
		}
		b.patch(t, cloudapi.KnobsPatch{Faults: &[]cloudapi.Fault{fault}})
		want := &cloudapi.Error{
			Status: http.StatusTooManyRequests, Code: "Slow", Message: "why", RetryAfter: 1500 * time.Millisecond,
		}
		if diff := cmp.Diff(want, asError(call())); diff != "" {
			t.Errorf("%s (-want +got):\n%s", op, diff)
		}
	}
	if s := b.cloud.Stats(); s.Faults != len(calls) || s.Live != 1 {
		t.Errorf("%d faults and %d live instances, want %d and 1", s.Faults, s.Live, len(calls))
	}
}
