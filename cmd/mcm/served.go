package main

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// servedPatience is how long mcm waits for the API server at its start. After a restart
// an API server answers a few seconds before it serves custom resources.
const servedPatience = 30 * time.Second

// servedTimeout is for one request, which client-go silently repeats while connections
// are reset.
const servedTimeout = 2 * time.Second

// awaitServed waits until the control cluster serves our types. It returns an error
// with the reason if it does not in time.
func awaitServed(ctx context.Context, cfg *rest.Config, patience time.Duration) error {
	cfg = rest.CopyConfig(cfg)
	cfg.Timeout = servedTimeout
	client, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		return fmt.Errorf("connect to the control cluster: %w", err)
	}
	const again = 250 * time.Millisecond
	tick := time.NewTicker(again)
	defer tick.Stop()
	late := time.After(patience)
	version := v1alpha1.SchemeGroupVersion.String()
	for tries := 1; ; tries++ {
		if _, err = client.ServerResourcesForGroupVersionWithContext(ctx, version); err == nil {
			return nil
		}
		if tries == 1 {
			klog.Background().Info("waiting for the control cluster to serve the Machine types", "host", cfg.Host, "version", version, "reason", err.Error())
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx) //nolint:wrapcheck // the caller's own
		case <-late:
			if apierrors.IsNotFound(err) {
				return fmt.Errorf("the control cluster at %s does not serve %s: apply the CustomResourceDefinitions in deploy/crds: %w", cfg.Host, version, err)
			}

			return fmt.Errorf("ask the control cluster at %s for %s: %w", cfg.Host, version, err)
		case <-tick.C:
		}
	}
}
