package steps

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func TestRun(t *testing.T) {
	t.Parallel()
	failure := errors.New("no luck")
	for name, c := range map[string]struct {
		reason string
		second Next
		err    error
		taken  int
		want   Next
	}{
		"proceed":        {"nothing stops it", Proceed, nil, 3, Proceed},
		"wait":           {"an event starts the next pass", Wait, nil, 2, Wait},
		"again":          {"time starts the next pass", Again(time.Second), nil, 2, Next{Stop: true, After: time.Second}},
		"again at once":  {"0 would mean never", Again(0), nil, 2, Next{Stop: true, After: time.Millisecond}},
		"error":          {"later steps rely on earlier ones", Proceed, failure, 2, Proceed},
		"wait and error": {"both are returned", Wait, failure, 2, Wait},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			taken := 0
			step := func(n Next, err error) Step {
				return func(context.Context) (Next, error) {
					taken++

					return n, err
				}
			}
			n, err := Run(t.Context(), step(Proceed, nil), step(c.second, c.err), step(Proceed, nil)) //nolint:gocritic // the third is like the first: only one of them is taken
			if taken != c.taken || n != c.want || !errors.Is(err, c.err) {
				t.Errorf("takes %d steps and returns %+v, %v; want %d, %+v, %v: %s", taken, n, err, c.taken, c.want, c.err, c.reason)
			}
		})
	}
}

func TestSchedule(t *testing.T) {
	t.Parallel()
	var s Schedule
	var got []time.Duration
	for _, d := range []time.Duration{time.Hour, 2 * time.Hour, time.Minute, -time.Minute} {
		got = append(got, s.After())
		s.LookAgain(d)
	}
	got = append(got, s.After())
	want := []time.Duration{0, time.Hour, time.Hour, time.Minute, time.Millisecond}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("times until the next pass (-want +got):\n%s", diff)
	}
	if a, b := Sooner(0, time.Second), Sooner(time.Second, 0); a != time.Second || b != time.Second {
		t.Errorf("the sooner of a second and never is %s and %s", a, b)
	}
}

func TestResult(t *testing.T) {
	t.Parallel()
	kind := schema.GroupResource{Resource: "machines"}
	failure := errors.New("no luck")
	for name, c := range map[string]struct {
		reason    string
		err, want error
		after     time.Duration
	}{
		"success":  {"it is looked at again in time", nil, nil, time.Hour},
		"conflict": {"another one has written", fmt.Errorf("store: %w", apierrors.NewConflict(kind, "a", failure)), nil, ConflictRetry},
		"removed":  {"there is nothing to write", fmt.Errorf("store: %w", apierrors.NewNotFound(kind, "a")), nil, ConflictRetry},
		"error":    {"the queue knows when to retry", failure, failure, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			result, err := Result(logr.Discard(), time.Hour, c.err)
			if !errors.Is(err, c.want) || result.RequeueAfter != c.after {
				t.Errorf("result is %+v, %v; want one after %s and %v: %s", result, err, c.after, c.want, c.reason)
			}
		})
	}
}
