package main

import (
	"os"
	"testing"
)

func TestMemoryOf(t *testing.T) {
	t.Parallel()
	m, err := memoryOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	const least = 1 << 10 // kibibytes; no Go program has less
	if m.now < least || m.most < m.now {
		t.Errorf("this program holds %+v KiB", m)
	}
	if _, err := memoryOf(-1); err == nil {
		t.Error("there is no process -1, and no error")
	}
}
