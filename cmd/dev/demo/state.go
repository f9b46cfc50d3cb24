package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// state is the file that up writes for down.
type state struct {
	Processes []stack.Recorded `json:"processes"`
	Cluster   *cluster         `json:"cluster,omitempty"`

	path string
}

// readState returns an empty state if there is no file.
func readState(path string) (*state, error) {
	s := &state{path: path}
	content, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(content, s); err != nil {
		return nil, fmt.Errorf("%s is damaged: %w; end the processes listed in it yourself, then remove it", path, err)
	}
	return s, nil
}

// add stores a process right after its start.
func (s *state) add(p *stack.Process) error {
	record, err := p.Record()
	if err != nil {
		return err
	}
	s.Processes = append(s.Processes, record)
	return s.write()
}

func (s *state) setCluster(c cluster) error {
	s.Cluster = &c
	return s.write()
}

// write replaces the file atomically.
func (s *state) write() error {
	content, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	temporary := s.path + ".new"
	if err := os.WriteFile(temporary, append(content, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, s.path)
}

func (s *state) remove() error {
	if err := os.Remove(s.path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// alive returns the processes that still run.
func (s *state) alive() []stack.Recorded {
	var alive []stack.Recorded
	for _, p := range s.Processes {
		if p.Alive() {
			alive = append(alive, p)
		}
	}
	return alive
}
