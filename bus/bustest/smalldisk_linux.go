package bustest

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// smallDisks marks the process that has mounts of its own, by the test that runs in it.
const smallDisks = "MACHINEBUS_TEST_SMALL_DISKS"

// A Disk is a file system of a few megabytes.
type Disk struct {
	// Dir is where it is mounted.
	Dir string
}

// OnSmallDisk runs the rest of a test on a disk of so many bytes. It has the test run in
// a process of its own, with mounts of its own, for which it needs to be root or the
// kernel to allow user namespaces: without, the test fails.
func OnSmallDisk(t *testing.T, bytes string, rest func(t *testing.T, disk Disk)) {
	t.Helper()
	if os.Getenv(smallDisks) != t.Name() {
		runApart(t)

		return
	}
	disk := Disk{Dir: t.TempDir()}
	if err := errors.Join(
		syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""),
		syscall.Mount("tmpfs", disk.Dir, "tmpfs", 0, "size="+bytes),
	); err != nil {
		t.Fatalf("mount a disk of %s: %v", bytes, err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(disk.Dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	rest(t, disk)
}

func runApart(t *testing.T) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^"+t.Name()+"$", "-test.v", "-test.count=1")
	cmd.Env = append(os.Environ(), smallDisks+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
	}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()+" ") {
		t.Fatalf("in a process with mounts of its own (which only root may make where the kernel has no user namespaces): %v\n%s", err, out)
	}
}

// Fill leaves no room on the disk.
func (d Disk) Fill(tb testing.TB) {
	tb.Helper()
	f, err := os.Create(d.ballast())
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = f.Close() }() // what was not written shows soon enough
	for _, chunk := range []int{64 << 10, 1 << 10, 1} {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, chunk))
		}
		if !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, io.ErrShortWrite) {
			tb.Fatal(err)
		}
	}
}

// Free undoes Fill.
func (d Disk) Free(tb testing.TB) {
	tb.Helper()
	if err := os.Remove(d.ballast()); err != nil {
		tb.Fatal(err)
	}
}

func (d Disk) ballast() string { return filepath.Join(d.Dir, "ballast") }
