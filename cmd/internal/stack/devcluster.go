package stack

import (
	"context"
	"path/filepath"
)

// A DevCluster is a Kubernetes control plane of our own.
type DevCluster struct {
	*Process

	// Kubeconfig is the admin's.
	Kubeconfig string
	dir        string
}

// StartDevCluster starts a cluster and returns when it is ready. Users are made
// beside the admin, as name or name:group1,group2.
func (s *Site) StartDevCluster(ctx context.Context, users ...string) (*DevCluster, error) {
	dir := s.path("cluster")
	args := []string{"run", "--dir", dir}
	for _, user := range users {
		args = append(args, "--users", user)
	}
	p, err := s.Start("devcluster", "devcluster", args...)
	if err != nil {
		return nil, err
	}
	kubeconfig, err := p.line(ctx, "ready kubeconfig=")
	if err != nil {
		return nil, err
	}
	return &DevCluster{Process: p, Kubeconfig: kubeconfig, dir: dir}, nil
}

// UserKubeconfig is that of a user whom StartDevCluster made.
func (c *DevCluster) UserKubeconfig(name string) string {
	return filepath.Join(c.dir, name+".kubeconfig")
}
