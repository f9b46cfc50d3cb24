package caller

import "testing"

func TestRoomWanted(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason      string
		has, before int64
		want        int64
	}{
		"new":        {"it reserves no more than it needs", 0, leastStreamBytes, leastStreamBytes},
		"half full":  {"half is left until the next look", leastStreamBytes / 2, leastStreamBytes, leastStreamBytes},
		"fills up":   {"it is not to be full at the next look", leastStreamBytes/2 + 1, leastStreamBytes, 2 * leastStreamBytes},
		"grown":      {"another manager has seen more in it", 0, 4 * leastStreamBytes, 4 * leastStreamBytes},
		"cut down":   {"its limit was lowered by hand", 0, 1, leastStreamBytes},
		"at its end": {"a bad replica fills so much and no more", mostStreamBytes, mostStreamBytes, mostStreamBytes},
		"far behind": {"it is seen for the first time, and takes nothing any more", 200 << 20, leastStreamBytes, 512 << 20},
		"no limit":   {"the limit was removed by hand", 1 << 40, -1, -1},
		"by hand":    {"the limit was raised by hand", 3 * mostStreamBytes, 4 * mostStreamBytes, 4 * mostStreamBytes},
		"nearly":     {"the last step ends at the bound", mostStreamBytes - 2, mostStreamBytes - 1, mostStreamBytes},
	} {
		if got := (streamInfo{bytes: tc.has, limit: tc.before}).wantedLimit(); got != tc.want {
			t.Errorf("%s: with %d of %d it wants %d, not %d: %s", name, tc.has, tc.before, got, tc.want, tc.reason)
		}
	}
}
