package replica

import (
	"io/fs"
	"math"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
)

const (
	// mostSlots is the default where memory is plenty: calls mostly wait for the provider.
	mostSlots = 512
	// leastSlots is the default however little memory there is.
	leastSlots = 32
	// slotMemory is the part of the memory limit in bytes that one slot stands for: three
	// calls (a create, a delete and a read), their goroutines, requests and connections.
	slotMemory = 256 << 10
)

// DefaultSlots is how many slots a replica has unless it is configured: 512, or fewer
// where the memory limit (GOMEMLIMIT, or the control group's) is below 128 MiB, but at
// least 32. How much is asked of a provider in all is up to mcm's limits.
func DefaultSlots() int {
	return slotsFor(memoryLimit(debug.SetMemoryLimit(-1), os.DirFS("/sys/fs/cgroup")))
}

func slotsFor(memory int64) int {
	return int(max(leastSlots, min(mostSlots, memory/slotMemory)))
}

// memoryLimit is the lower one of the runtime's limit and the control group's, version 2
// or 1; [math.MaxInt64] where there is none.
func memoryLimit(runtimeLimit int64, cgroup fs.FS) int64 {
	limit := runtimeLimit
	for _, file := range []string{"memory.max", "memory/memory.limit_in_bytes"} {
		text, err := fs.ReadFile(cgroup, file)
		if err != nil {
			continue // another version, or another system
		}
		if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && n > 0 {
			limit = min(limit, n)
		}
	}
	if limit <= 0 {
		return math.MaxInt64
	}

	return limit
}
