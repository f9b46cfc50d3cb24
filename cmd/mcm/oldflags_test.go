package main

import (
	"strings"
	"testing"
)

// The command lines of the machine controller manager's two programs, v0.62.1, with every flag that each has. Pasted one
// after the other they start one mcm.
const (
	oldManager = `--address=0.0.0.0 --autoscaler-scaledown-annotation-during-rollout=true --cloud-provider= --concurrent-syncs=30 --contention-profiling
		--control-kubeconfig=inClusterConfig --controller-start-interval=0s --kube-api-burst=30 --kube-api-content-type=application/vnd.kubernetes.protobuf
		--kube-api-qps=20 --leader-elect=true --leader-elect-lease-duration=15s --leader-elect-renew-deadline=10s --leader-elect-resource-lock=leases
		--leader-elect-retry-period=2s --machine-safety-overshooting-period=1m --min-resync-period=12h --namespace=shoot--one --port=10258
		--profiling=false --safety-down=1 --safety-up=2 --target-kubeconfig=/var/run/kubeconfig --v=2`
	oldController = `--address=0.0.0.0 --bootstrap-token-auth-extra-groups=a,b --concurrent-syncs=30 --contention-profiling=true
		--control-kubeconfig=inClusterConfig --machine-creation-timeout=20m --machine-drain-timeout=2h --machine-health-timeout=10m
		--machine-inplace-update-timeout=20m --machine-max-evict-retries=360 --machine-preserve-timeout=72h --machine-pv-detach-timeout=2m
		--machine-pv-reattach-timeout=90s --machine-safety-apiserver-statuscheck-period=1m --machine-safety-apiserver-statuscheck-timeout=30s
		--machine-safety-orphan-vms-period=15m --namespace=shoot--one --node-conditions=ReadonlyFilesystem,KernelDeadlock,DiskPressure --port=10259
		--resource-exhausted-retry=10m --target-kubeconfig=/var/run/kubeconfig --v=3`
)

func TestOldCommandLines(t *testing.T) {
	t.Parallel()
	for name, line := range map[string]string{
		"manager": oldManager, "controller": oldController, "both": oldManager + " " + oldController,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := newCommand()
			if err := cmd.ParseFlags(strings.Fields(line)); err != nil {
				t.Error(err)
			}
			for without := range flagsWithoutEffect {
				if cmd.Flags().Changed(without) && !cmd.Flags().Lookup(without).Hidden {
					t.Errorf("--help lists --%s, which has no effect", without)
				}
			}
		})
	}
}

// A limit of 0 meant the default, and the client library's is 5 requests per second.
func TestNoRequestLimitGiven(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		o     options
		qps   float32
		burst int
	}{
		"zero":     {options{}, defaultQPS, defaultBurst},
		"given":    {options{kubeQPS: 20, kubeBurst: 30}, 20, 30},
		"no limit": {options{kubeQPS: -1}, -1, defaultBurst},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if qps, burst := tc.o.requestLimits(); qps != tc.qps || burst != tc.burst {
				t.Errorf("%g per second and %d at once, want %g and %d", qps, burst, tc.qps, tc.burst)
			}
		})
	}
}
