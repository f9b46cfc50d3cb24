package replica

import (
	"math"
	"testing"
	"testing/fstest"
)

func TestDefaultSlots(t *testing.T) {
	t.Parallel()
	const v2, v1, none = "memory.max", "memory/memory.limit_in_bytes", math.MaxInt64
	for name, tc := range map[string]struct {
		runtime    int64
		file, text string
		want       int
	}{
		"no limit":             {none, "", "", 512},
		"no control group":     {none, v2, "max\n", 512},
		"the container is big": {none, v2, "1073741824\n", 512},
		"just enough":          {none, v2, "134217728\n", 512},
		"half of it":           {none, v2, "67108864\n", 256},
		"version 1":            {none, v1, "67108864\n", 256},
		"version 1, no limit":  {none, v1, "9223372036854771712\n", 512},
		"GOMEMLIMIT is lower":  {64 << 20, v2, "134217728\n", 256},
		"hardly any":           {none, v2, "1048576\n", 32},
		"GOMEMLIMIT of 0":      {0, v2, "max\n", 512},
		"not a number":         {none, v2, "many\n", 512},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			files := fstest.MapFS{}
			if tc.file != "" {
				files[tc.file] = &fstest.MapFile{Data: []byte(tc.text)}
			}
			if got := slotsFor(memoryLimit(tc.runtime, files)); got != tc.want {
				t.Errorf("%d slots, want %d", got, tc.want)
			}
		})
	}
}
