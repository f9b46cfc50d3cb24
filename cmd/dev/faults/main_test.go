package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"
)

// TestRunBuses fails the run itself: earlier findings are printed, and count.
func TestRunBuses(t *testing.T) {
	t.Parallel()
	errAway := errors.New("the API server is away")
	for name, tc := range map[string]struct {
		reason   string
		find     map[string][]finding // by bus
		fail     string               // the bus
		damage   bool                 // was to be found
		want     int
		wantLine string
	}{
		"well": {reason: "nothing has gone wrong", wantLine: "lost 0 doubled 0 leaked 0 stuck 0"},
		"on the second": {
			reason: "the first bus has damage", find: map[string][]finding{busCluster: {foundf(lost, "uid", 1, "machine a")}},
			fail: busEmbedded, want: 1, wantLine: "lost 1 doubled 0 leaked 0 stuck 0",
		},
		"of the judge": {
			reason: "damage was found before it could not go on", find: map[string][]finding{busCluster: {foundf(stuck, "uid", 1, "machine a")}},
			fail: busCluster, want: 1, wantLine: "lost 0 doubled 0 leaked 0 stuck 1",
		},
		"without damage": {
			reason: "nothing is known about machines", fail: busEmbedded, want: 2, wantLine: "lost 0 doubled 0 leaked 0 stuck 0",
		},
		"without what was sought": {
			reason: "a machine that is lost is not what was to be found", find: map[string][]finding{busCluster: {foundf(lost, "uid", 1, "machine a")}},
			fail: busEmbedded, damage: true, want: 2, wantLine: "lost 1 doubled 0 leaked 0 stuck 0",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			o := &options{buses: []string{busCluster, busEmbedded}, lifecycles: 2, each: 1, damage: tc.damage}
			err := runBuses(o, &out, func(one *tally) error {
				one.find(tc.find[one.bus]...)
				if one.bus == tc.fail {
					return errAway
				}
				one.lifecycles = one.asked
				return nil
			})
			if tc.want == 0 && err != nil || tc.want != 0 && (err == nil || status(err) != tc.want) {
				t.Errorf("%s: %v, want exit status %d", tc.reason, err, tc.want)
			}
			if tc.fail != "" && (err == nil || !strings.Contains(err.Error(), errAway.Error())) {
				t.Errorf("%s: the error lacks what went wrong: %v", tc.reason, err)
			}
			if !strings.Contains("\n"+out.String(), "\n"+tc.wantLine+"\n") {
				t.Errorf("%s: there is no line %q:\n%s", tc.reason, tc.wantLine, out.String())
			}
			for bus, found := range tc.find {
				if !strings.Contains(out.String(), bus+": "+found[0].damage+": "+found[0].text) {
					t.Errorf("%s: findings on the bus %s are not printed:\n%s", tc.reason, bus, out.String())
				}
			}
		})
	}
}
