package main

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// A journal is the file in which a world logs what it did and when.
type journal struct {
	mu   sync.Mutex
	file *os.File
}

func newJournal(dir string) (*journal, error) {
	file, err := os.Create(filepath.Join(dir, "faults.log"))
	return &journal{file: file}, err
}

func (j *journal) sayf(format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	fmt.Fprintln(j.file, time.Now().UTC().Format(time.RFC3339Nano), fmt.Sprintf(format, args...))
}

func (j *journal) close() { _ = j.file.Close() }
