package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/machinebus/machinebus/cmd/internal/stack"
)

// paths are where things lie in the clone.
type paths struct {
	root string // of the clone
	bin  string // the built programs
	run  string // what running ones write
}

// findPaths goes by where this program lies: .out/bin in the clone.
func findPaths() (paths, error) {
	self, err := os.Executable()
	if err != nil {
		return paths{}, fmt.Errorf("find this program: %w", err)
	}
	bin := filepath.Dir(self)
	p := paths{root: filepath.Dir(filepath.Dir(bin)), bin: bin, run: filepath.Join(filepath.Dir(bin), "run")}
	if _, err := os.Stat(p.crds()); err != nil {
		return p, fmt.Errorf("this program belongs into .out/bin of a clone of machinebus: run it by make demo (%w)", err)
	}
	return p, os.MkdirAll(p.run, 0o700)
}

func (p paths) crds() string { return filepath.Join(p.root, "deploy", "crds") }

func (p paths) example(file string) string { return filepath.Join(p.root, "deploy", "examples", file) }

func (p paths) state() string { return filepath.Join(p.run, "up", "state.json") }

// short is a path as the user sees it from the clone.
func (p paths) short(path string) string {
	if rel, err := filepath.Rel(p.root, path); err == nil && !strings.HasPrefix(rel, "..") {
		return rel
	}
	return path
}

// checkBuilt refuses to begin with programs missing.
func (p paths) checkBuilt(programs ...string) error {
	if missing := stack.Missing(p.bin, programs...); len(missing) > 0 {
		return fmt.Errorf("not built: %s in %s; make demo builds them", strings.Join(missing, ", "), p.short(p.bin))
	}
	return nil
}

// lock keeps others from doing the same at once. Busy is the error for the one
// who comes second.
func (p paths) lock(name, busy string) (release func(), err error) {
	release, err = stack.Lock(filepath.Join(p.run, name+".lock"))
	if locked, ok := errors.AsType[*stack.LockedError](err); ok {
		return nil, fmt.Errorf("%s (process %s)", busy, locked.Holder)
	}
	return release, err
}
