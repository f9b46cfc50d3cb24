package main

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// cpuTime returns the processor time of a process in user and kernel mode:
// proc_pid_stat(5), utime and stime, in ticks of 1/100 s on Linux.
func cpuTime(pid int) (time.Duration, error) {
	const tick = 10 * time.Millisecond
	path := fmt.Sprintf("/proc/%d/stat", pid)
	content, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	// The second field, the program's name in parentheses, may contain any character.
	fields := strings.Fields(string(content[bytes.LastIndexByte(content, ')')+1:]))
	const utime, stime = 11, 12 // counted from the third field
	if len(fields) <= stime {
		return 0, fmt.Errorf("unreadable %s", path)
	}
	var total time.Duration
	for _, field := range []int{utime, stime} {
		ticks, err := strconv.ParseInt(fields[field], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("unreadable %s: %w", path, err)
		}
		total += time.Duration(ticks) * tick
	}
	return total, nil
}
