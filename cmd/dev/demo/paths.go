package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// paths holds directories of the clone.
type paths struct {
	root string // of the clone
	bin  string // the built programs
	run  string // files that running programs write
}

// findPaths derives the paths from this program's own: it is in .out/bin of the clone.
func findPaths() (paths, error) {
	self, err := os.Executable()
	if err != nil {
		return paths{}, fmt.Errorf("find this program: %w", err)
	}
	bin := filepath.Dir(self)
	p := paths{root: filepath.Dir(filepath.Dir(bin)), bin: bin, run: filepath.Join(filepath.Dir(bin), "run")}
	if _, err := os.Stat(p.crds()); err != nil {
		return p, fmt.Errorf("this program must be in .out/bin of a clone of machinebus: run it with make demo (%w)", err)
	}
	return p, os.MkdirAll(p.run, 0o700)
}

func (p paths) crds() string { return filepath.Join(p.root, "deploy", "crds") }

func (p paths) example(file string) string { return filepath.Join(p.root, "deploy", "examples", file) }

func (p paths) state() string { return filepath.Join(p.run, "up", "state.json") }

// short returns a path relative to the clone, if it is inside.
func (p paths) short(path string) string {
	if rel, err := filepath.Rel(p.root, path); err == nil && !strings.HasPrefix(rel, "..") {
		return rel
	}
	return path
}

// checkBuilt returns an error if programs are missing.
func (p paths) checkBuilt(programs ...string) error {
	if missing := stack.Missing(p.bin, programs...); len(missing) > 0 {
		return fmt.Errorf("not built: %s in %s; build them with make demo", strings.Join(missing, ", "), p.short(p.bin))
	}
	return nil
}

// lock prevents that another process does the same. busy is the error text if one does.
func (p paths) lock(name, busy string) (release func(), err error) {
	release, err = stack.Lock(filepath.Join(p.run, name+".lock"))
	if locked, ok := errors.AsType[*stack.LockedError](err); ok {
		return nil, fmt.Errorf("%s (process %s)", busy, locked.Holder)
	}
	return release, err
}
