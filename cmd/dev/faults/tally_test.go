package main

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestVerdict(t *testing.T) {
	t.Parallel()
	kinds := []string{"kill", "cut"}
	for name, tc := range map[string]struct {
		reason  string
		spoil   func(cluster, embedded *tally)
		want    string // in the error; empty for none
		damaged bool
		wanted  string // besides
	}{
		"well": {reason: "all has happened, and all machines have survived", spoil: func(_, _ *tally) {}},
		"missed here": {
			reason: "it has happened on the other bus only",
			spoil:  func(_, e *tally) { delete(e.hit, "kill"); e.count("kill", false) },
			want:   "bus embedded: these faults had an effect less than 1 times: [kill]",
		},
		"not enough": {
			reason: "once is less than twice", spoil: func(c, _ *tally) { c.each = 2; c.count("kill", true) },
			want: "bus cluster: these faults had an effect less than 2 times: [cut]",
		},
		"nowhere": {
			reason: "a kind was asked for that no bus has", spoil: func(_, _ *tally) {}, wanted: "kick",
			want: "these faults cannot happen on any bus of this run: [kick]",
		},
		"few": {
			reason: "the other bus has enough for both", spoil: func(c, e *tally) { c.lifecycles, e.lifecycles = 20, 4 },
			want: "bus embedded: 4 of 5 lifecycles: raise --limit",
		},
		"strange": {
			reason: "an instance was made for no Machine", spoil: func(c, _ *tally) { c.machines, c.strange = 40, 1 },
			want: "bus cluster: the cloud created instances for 1 machines, of 40, that the API server never stored",
		},
		"crashed": {
			reason: "it was started again, which hides it", spoil: func(c, _ *tally) { c.crash(errors.New("mcm-1 ended: panic")) },
			want: "1 processes crashed", damaged: true,
		},
		"leaked": {
			reason: "one is enough", spoil: func(c, _ *tally) { c.find(foundf(leaked, "uid", 1, "machine")) },
			want: errDamaged.Error(), damaged: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tallies := []*tally{newTally("cluster", 5, 1), newTally("embedded", 5, 1)}
			tallies[0].expect(kinds, nil)
			tallies[1].expect(kinds[:1], kinds[1:])
			for _, one := range tallies {
				one.lifecycles = 5
				for _, k := range one.kinds {
					one.count(k, true)
				}
			}
			tallies[0].surplus = 3
			tc.spoil(tallies[0], tallies[1])
			var out bytes.Buffer
			wanted := kinds
			if tc.wanted != "" {
				wanted = append(slices.Clone(kinds), tc.wanted)
			}
			err := verdict(&out, wanted, tallies)
			if (err != nil) != (tc.want != "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%s: %v, want %q in it\n%s", tc.reason, err, tc.want, out.String())
			}
			if got := status(err) == 1; err != nil && got != tc.damaged {
				t.Errorf("%s: the exit status means damage: %v", tc.reason, got)
			}
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			want := fmt.Sprintf("lost 0 doubled 0 leaked %d stuck 0", len(tallies[0].found))
			if last := lines[len(lines)-1]; last != want {
				t.Errorf("%s: the last line is %q, want %q", tc.reason, last, want)
			}
			if !slices.Contains(lines, "cluster: fault cut              1, missed 0") {
				t.Errorf("faults are not printed by bus:\n%s", out.String())
			}
			if !slices.Contains(lines, "embedded: not on this bus: cut") || strings.Contains(out.String(), "cluster: not on this bus") {
				t.Errorf("the faults that a bus cannot have are not printed:\n%s", out.String())
			}
			if !slices.Contains(lines, "cluster: surplus of none, collected: 3") {
				t.Errorf("the surplus of the identity none is not printed:\n%s", out.String())
			}
		})
	}
}

// TestSought has runs that were to come to damage end with 1 only if instances were made
// that must not be.
func TestSought(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		spoil func(*tally)
		want  int
	}{
		"nothing":      {func(*tally) {}, 2},
		"crashed":      {func(one *tally) { one.crash(errors.New("mcm-1 ended: panic")) }, 2},
		"lost":         {func(one *tally) { one.find(foundf(lost, "uid", 1, "machine")) }, 2},
		"stuck":        {func(one *tally) { one.find(foundf(stuck, "uid", 1, "machine")) }, 2},
		"doubled":      {func(one *tally) { one.find(foundf(doubled, "uid", 1, "machine")) }, 1},
		"leaked":       {func(one *tally) { one.find(foundf(leaked, "uid", 1, "machine")) }, 1},
		"and too few":  {func(one *tally) { one.find(foundf(leaked, "uid", 1, "machine")); one.asked++ }, 1},
		"too few only": {func(one *tally) { one.asked++ }, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tallies := []*tally{newTally("cluster", 0, 1), newTally("embedded", 0, 1)}
			tc.spoil(tallies[1])
			var out bytes.Buffer
			err := sought(&out, tallies, verdict(&out, nil, tallies))
			if err == nil || status(err) != tc.want {
				t.Errorf("%v, want an error of status %d", err, tc.want)
			}
		})
	}
}
