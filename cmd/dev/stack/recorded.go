package stack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A Recorded identifies a process for another program. A process id may be reused; with
// the boot and the start time it is unique.
type Recorded struct {
	Name string `json:"name"`
	PID  int    `json:"pid"`
	// Started is in clock ticks since the boot (proc_pid_stat(5), starttime).
	Started uint64 `json:"started"`
	// Boot is the kernel's random boot id.
	Boot string `json:"boot"`
	Log  string `json:"log"`
}

// Record returns the record of a running process.
func (p *Process) Record() (Recorded, error) {
	started, err := startTime(p.PID())
	if err != nil {
		return Recorded{}, fmt.Errorf("record %s: %w", p.Name, err)
	}
	boot, err := bootID()
	if err != nil {
		return Recorded{}, fmt.Errorf("record %s: %w", p.Name, err)
	}
	return Recorded{Name: p.Name, PID: p.PID(), Started: started, Boot: boot, Log: p.Log}, nil
}

// Alive reports whether exactly this process still runs.
func (r Recorded) Alive() bool {
	boot, err := bootID()
	if err != nil || boot != r.Boot {
		return false
	}
	started, err := startTime(r.PID)
	return err == nil && started == r.Started
}

// Stop ends the process if it still runs: SIGTERM, then SIGKILL after a while.
func (r Recorded) Stop() error {
	// On Linux this is a pidfd, which cannot denote another process by the time of the
	// signal.
	process, err := os.FindProcess(r.PID)
	if err != nil {
		return fmt.Errorf("stop %s: %w", r.Name, err)
	}
	defer process.Release() //nolint:errcheck // it only closes the handle
	if !r.Alive() {
		return nil
	}
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		if err := process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return fmt.Errorf("send %s to %s (process %d): %w", s, r.Name, r.PID, err)
		}
		if r.awaitEnd() {
			return nil
		}
	}
	return fmt.Errorf("%s (process %d) did not exit even after SIGKILL; its log: %s", r.Name, r.PID, r.Log)
}

// awaitEnd reports whether the process ends within stopLimit.
func (r Recorded) awaitEnd() bool {
	ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
	defer cancel()
	return Poll(ctx, r.Name+" has ended", func(context.Context) error {
		if r.Alive() {
			return errors.New("it runs")
		}
		return nil
	}) == nil
}

// Since returns how long a recorded process has run, roughly.
func (r Recorded) Since() time.Duration {
	info, err := os.Stat("/proc/" + strconv.Itoa(r.PID))
	if err != nil {
		return 0
	}
	return time.Since(info.ModTime()).Round(time.Second)
}

var errNoProcess = errors.New("no such process")

// startTime returns field 22 of /proc/PID/stat, and errNoProcess for a zombie.
func startTime(pid int) (uint64, error) {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return 0, errNoProcess
	}
	if err != nil {
		return 0, err
	}
	// The second field, the program's name in parentheses, may contain any character.
	fields := strings.Fields(string(content[bytes.LastIndexByte(content, ')')+1:]))
	const state, start = 0, 19 // counted from the third field
	if len(fields) <= start {
		return 0, fmt.Errorf("unreadable /proc/%d/stat", pid)
	}
	if fields[state] == "Z" || fields[state] == "X" {
		return 0, errNoProcess
	}
	return strconv.ParseUint(fields[start], 10, 64)
}

func bootID() (string, error) {
	content, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(content)), err
}
