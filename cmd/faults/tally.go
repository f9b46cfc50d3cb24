package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

// A tally is what a run has come to. It is safe for concurrent use.
type tally struct {
	mu    sync.Mutex
	kinds map[string]int

	lifecycles                   int
	lost, doubled, leaked, stuck int
}

func newTally() *tally { return &tally{kinds: map[string]int{}} }

func (t *tally) count(kind string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kinds[kind]++
}

// missing returns those kinds that have not happened.
func (t *tally) missing(kinds []string) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(kinds), func(k string) bool { return t.kinds[k] > 0 })
}

// verdict prints the figures, and returns an error unless all is well.
func (t *tally) verdict(o *options, out io.Writer) error {
	fmt.Fprintf(out, "lifecycles %d\n", t.lifecycles)
	for _, kind := range o.kinds {
		fmt.Fprintf(out, "fault %-16s %d\n", kind, t.kinds[kind])
	}
	var errs []error
	if t.lifecycles < o.lifecycles {
		errs = append(errs, fmt.Errorf("%d lifecycles of the %d asked for: try a higher --limit", t.lifecycles, o.lifecycles))
	}
	if missing := t.missing(o.kinds); len(missing) > 0 {
		errs = append(errs, fmt.Errorf("these faults never happened: %v", missing))
	}
	if t.lost+t.doubled+t.leaked+t.stuck > 0 {
		errs = append(errs, errors.New("machines did not survive; what is wrong with which stands above"))
	}
	fmt.Fprintf(out, "lost %d doubled %d leaked %d stuck %d\n", t.lost, t.doubled, t.leaked, t.stuck)
	return errors.Join(errs...)
}

// A journal is the file in which a world tells what it did and when.
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
