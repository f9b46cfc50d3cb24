package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// clusterName is the demo's control plane on the bus.
const clusterName = "demo"

// The cloud is slowed down, so that there is something to see.
const (
	createLatency = 500 * time.Millisecond
	bootDelay     = 1500 * time.Millisecond
)

// A setup is started by both run and up.
type setup struct {
	*narrator

	paths paths
	site  *stack.Site

	cluster cluster
	kube    client.Client
	cloud   *stack.Cloud
	manager *stack.Manager
	tap     *stack.Tap
	drivers []*stack.Driver

	victim *stack.Driver // the replica that was killed
	killed []string      // ids of the creates it ran
}

// programs returns the programs of the set-up.
func programs() []string {
	needed := []string{"virtual-cloud", "mcm", "driver-virtual", "mcmctl"}
	if os.Getenv(kubeconfigVariable) == "" {
		needed = append(needed, "devcluster")
	}
	return needed
}

// start starts everything in four steps. Even after an error stop must be called.
func (s *setup) start(ctx context.Context) error {
	for _, part := range []func(context.Context) error{s.startCluster, s.startCloud, s.startManager, s.startDrivers} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (s *setup) startCloud(ctx context.Context) error {
	s.beginf("starting the virtual cloud, whose instances join the cluster as Nodes")
	cloud, err := s.site.StartCloud(ctx, "virtual-cloud", s.cluster.Kubeconfig)
	if err != nil {
		return err
	}
	s.cloud = cloud
	latency, boot := cloudapi.Duration(createLatency), cloudapi.Duration(bootDelay)
	if _, err := cloud.Admin.Patch(ctx, cloudapi.KnobsPatch{CreateLatency: &latency, BootDelay: &boot}); err != nil {
		return err
	}
	s.detailf("ready at %s: a create takes %s, a boot %s", cloud.Endpoint, createLatency, bootDelay)
	return nil
}

func (s *setup) startManager(ctx context.Context) error {
	s.beginf("starting mcm, the machine controller manager, with an embedded NATS")
	manager, err := s.site.StartManager(ctx, stack.ManagerOptions{
		Control: s.cluster.Kubeconfig, Namespace: s.cluster.Namespace, Cluster: clusterName,
	})
	if err != nil {
		return err
	}
	s.manager = manager
	s.detailf("ready: the bus is at %s, health and metrics at http://%s", manager.NATSURL, manager.Address)
	s.tap, err = stack.OpenTap(ctx, manager.NATSURL, clusterName)
	return err
}

func (s *setup) startDrivers(ctx context.Context) error {
	s.beginf("starting two replicas of driver-virtual, which connect only to the bus")
	for i := 1; i <= 2; i++ {
		driver, err := s.site.StartDriver(ctx, s.tap, stack.DriverOptions{
			Name: fmt.Sprintf("driver-virtual-%d", i), NATSURL: s.manager.NATSURL, Clusters: []string{clusterName},
		})
		if err != nil {
			return err
		}
		s.drivers = append(s.drivers, driver)
		s.detailf("replica %s is connected to the bus (process %d)", driver.Replica, driver.PID())
	}
	return nil
}

// stopLimit bounds the clean-up of a cluster.
const stopLimit = 30 * time.Second

// stop ends everything. It works even after the context of start has ended.
func (s *setup) stop() error {
	// The cluster first: mcm and the drivers delete the remaining machines.
	ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
	defer cancel()
	var errs []error
	if s.cloud != nil && s.cluster.Foreign {
		errs = append(errs, s.cloud.Hold(ctx)) // an instance cannot be deleted during its creation
	}
	if s.kube != nil {
		errs = append(errs, s.cluster.clean(ctx, s.narrator, s.kube))
	}
	if s.tap != nil {
		s.tap.Close()
	}
	return errors.Join(append(errs, s.site.Close())...)
}

// logs returns a pattern for the logs of all programs.
func (s *setup) logs() string { return s.paths.short(filepath.Join(s.site.Dir(), "*.log")) }
