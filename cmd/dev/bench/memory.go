package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// memoryUse is the resident memory of a process in kibibytes.
type memoryUse struct{ now, most int64 }

// memoryOf reads it from proc_pid_status(5): VmRSS, and VmHWM for the most since
// the process was started.
func memoryOf(pid int) (memoryUse, error) {
	path := fmt.Sprintf("/proc/%d/status", pid)
	content, err := os.ReadFile(path)
	if err != nil {
		return memoryUse{}, err
	}
	var m memoryUse
	var errs []error
	for line := range strings.Lines(string(content)) {
		name, value, _ := strings.Cut(line, ":")
		var into *int64
		switch name {
		case "VmRSS":
			into = &m.now
		case "VmHWM":
			into = &m.most
		default:
			continue
		}
		if _, err := fmt.Sscanf(value, "%d kB", into); err != nil {
			errs = append(errs, fmt.Errorf("unreadable %s: %s: %w", path, name, err))
		}
	}
	if m.now == 0 || m.most == 0 {
		errs = append(errs, fmt.Errorf("%s lacks VmRSS and VmHWM", path))
	}
	return m, errors.Join(errs...)
}

func mebibytes(kibibytes int64) string { return fmt.Sprintf("%d MiB", kibibytes>>10) }
