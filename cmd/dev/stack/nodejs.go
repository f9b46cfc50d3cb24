package stack

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// NodeOptions configure a driver in Node.js. All but Env are required.
type NodeOptions struct {
	// Name of the process.
	Name string
	// Dir is the folder with driver.mjs and its installed packages.
	Dir string
	// NATSURL is the bus, Cluster the control plane to serve.
	NATSURL, Cluster string
	// Env (as NAME=value) is added to the environment.
	Env []string
}

// StartPlainNode starts a driver without sessions, and returns when it prints that it
// serves.
func (s *Site) StartPlainNode(ctx context.Context, o NodeOptions) (*Process, error) {
	p, err := s.startNode(o)
	if err != nil {
		return nil, err
	}
	_, err = p.line(ctx, "serving")
	return p, err
}

// StartNode starts a replica with sessions, and returns when it sends one. Like
// [Site.StartDriver] it must not be called concurrently.
func (s *Site) StartNode(ctx context.Context, tap *Tap, o NodeOptions) (*Driver, error) {
	known := tap.Sessions()
	p, err := s.startNode(o)
	if err != nil {
		return nil, err
	}
	return p.awaitSession(ctx, tap, known)
}

func (s *Site) startNode(o NodeOptions) (*Process, error) {
	node, err := exec.LookPath("node")
	if err != nil {
		return nil, fmt.Errorf("start %s: %w; run: make nodejs", o.Name, err)
	}
	if node, err = filepath.Abs(node); err != nil {
		return nil, fmt.Errorf("start %s: %w", o.Name, err)
	}
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", o.Name, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "node_modules")); err != nil {
		return nil, fmt.Errorf("start %s: its packages are not installed: %w; run: make nodejs", o.Name, err)
	}
	return s.start(command{
		name: o.Name, program: node, args: []string{filepath.Join(dir, "driver.mjs")},
		env: append([]string{"NATS_URL=" + o.NATSURL, "CLUSTER=" + o.Cluster}, o.Env...),
	})
}
