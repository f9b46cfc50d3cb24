package stack

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
)

// A DevCluster is a Kubernetes control plane run by devcluster.
type DevCluster struct {
	*Process

	// Kubeconfig is the admin's. It stays valid across Restart.
	Kubeconfig string
	// EtcdURL is the plain HTTP address of etcd. It stays valid across Restart.
	EtcdURL string

	dir  string
	site *Site
}

// StartDevCluster starts a cluster and returns when it is ready. It creates users
// besides the admin, given as name or name:group1,group2.
func (s *Site) StartDevCluster(ctx context.Context, users ...string) (*DevCluster, error) {
	return s.StartDevClusterOf(ctx, nil, users...)
}

// StartDevClusterOf is StartDevCluster with only these of Kubernetes' controllers; none
// means the default ones.
func (s *Site) StartDevClusterOf(ctx context.Context, controllers []string, users ...string) (*DevCluster, error) {
	var args []string
	if len(controllers) > 0 {
		args = append(args, "--controllers="+strings.Join(controllers, ","))
	}
	for _, user := range users {
		args = append(args, "--users", user)
	}
	return s.startDevCluster(ctx, args)
}

// StartDevClusterWithHistory is StartDevCluster with an etcd that keeps all versions of
// objects, so that a watch misses none.
func (s *Site) StartDevClusterWithHistory(ctx context.Context) (*DevCluster, error) {
	return s.startDevCluster(ctx, []string{"--apiserver-arg=--etcd-compaction-interval=0"})
}

// StartAPIServer starts an API server without Kubernetes' controllers.
func (s *Site) StartAPIServer(ctx context.Context) (*DevCluster, error) {
	return s.startDevCluster(ctx, []string{"--no-controller-manager"})
}

func (s *Site) startDevCluster(ctx context.Context, more []string) (*DevCluster, error) {
	c := &DevCluster{dir: s.path("cluster"), site: s}
	// Explicit ports, so that they stay the same after a restart.
	plan := func(ports []int) command {
		args := []string{"run", "--dir", c.dir, "--secure-port", fmt.Sprint(ports[0]), "--etcd-port", fmt.Sprint(ports[1])}
		return command{name: "devcluster", program: "devcluster", args: append(args, more...)}
	}
	p, ports, err := s.startOnFreePorts(ctx, 2, plan, func(ctx context.Context, p *Process, _ []int) (err error) {
		c.Kubeconfig, err = p.line(ctx, readyLine)
		return err
	})
	if err != nil {
		return nil, err
	}
	c.Process, c.EtcdURL = p, "http://"+Loopback(ports[1])
	return c, nil
}

// readyLine is what devcluster prints before the path of the admin's kubeconfig.
const readyLine = "ready kubeconfig="

// Restart runs the ended cluster again with its etcd's data, and returns when it is ready.
func (c *DevCluster) Restart(ctx context.Context) error {
	p, err := c.site.Restart(c.Process, "--keep")
	if err != nil {
		return err
	}
	c.Process = p
	_, err = p.line(ctx, readyLine)
	return err
}

// EtcdDir returns etcd's directory, which must not be changed while the cluster runs.
func (c *DevCluster) EtcdDir() string { return filepath.Join(c.dir, "internal", "etcd") }

// UserKubeconfig returns the kubeconfig of a user that StartDevCluster created.
func (c *DevCluster) UserKubeconfig(name string) string {
	return filepath.Join(c.dir, name+".kubeconfig")
}
