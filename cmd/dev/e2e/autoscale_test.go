package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// kubectl runs kubectl in the env's namespace and returns what it printed.
func (e *env) kubectl(args ...string) string {
	e.Helper()
	args = append([]string{"kubectl", "--kubeconfig", e.cluster.Kubeconfig, "--namespace", e.name}, args...)
	cmd := exec.CommandContext(e.ctx(), e.site.Program("devcluster"), args...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		e.Fatalf("kubectl %s: %v\n%s", strings.Join(args[5:], " "), err, out)
	}
	return string(out)
}

// TestKubectl scales a pool with kubectl, and has Kubernetes' own autoscaler keep
// it within its bounds, for which that needs no metrics.
func TestKubectl(t *testing.T) {
	e := newEnv(t)
	e.startManager("", "--controllers=*,-machine")
	other := &otherController{env: e}
	d := e.newPoolObject()
	e.must(e.kube.Create(e.ctx(), d))
	const resource = "machinedeployment.machine.sapcloud.io/"
	e.kubectl("scale", resource+d.Name, "--replicas=1")
	other.runUntil("the pool has the machine", func(ctx context.Context) error { return e.poolHas(ctx, d, 1) })

	e.kubectl("autoscale", resource+d.Name, "--min=3", "--max=4")
	other.runUntil("the pool has the autoscaler's least", func(ctx context.Context) error { return e.poolHas(ctx, d, 3) })
	e.kubectl("scale", resource+d.Name, "--replicas=6")
	other.runUntil("the pool has the autoscaler's most", func(ctx context.Context) error { return e.poolHas(ctx, d, 4) })
	e.kubectl("delete", "hpa", d.Name)

	// What people see first.
	var heads []string
	for line := range strings.Lines(e.kubectl("get", "mcd,mcs,mc", "--no-headers=false")) {
		if fields := strings.Fields(line); len(fields) > 0 && fields[0] == "NAME" {
			heads = append(heads, strings.Join(fields, " "))
		}
	}
	want := []string{
		"NAME READY DESIRED UP-TO-DATE AVAILABLE AGE", "NAME DESIRED CURRENT READY AGE", "NAME STATUS AGE NODE",
	}
	if diff := cmp.Diff(want, heads); diff != "" {
		t.Errorf("columns (-want +got):\n%s", diff)
	}
	wide := e.kubectl("get", "mcd", "-o", "wide")
	for _, want := range []string{"CLASS", className, "FROZEN", "FAILURE", "PROGRESS", "NewMachineSetAvailable", "MESSAGE", "has successfully progressed."} {
		if !strings.Contains(wide, want) {
			t.Errorf("kubectl get -o wide does not show %q:\n%s", want, wide)
		}
	}
	e.kubectl("delete", "mcd", d.Name, "--wait=false")
	other.runUntil("nothing is left", func(ctx context.Context) error {
		names, err := e.machineNames(ctx)
		if err == nil && len(names) > 0 {
			err = fmt.Errorf("machines %q", names)
		}
		return err
	})
}

// poolHas returns an error until a deployment has n machines, says so in just the
// conditions that others look for, and has no other machine.
func (e *env) poolHas(ctx context.Context, d *v1alpha1.MachineDeployment, n int) error {
	if err := e.kube.Get(ctx, client.ObjectKeyFromObject(d), d); err != nil {
		return err
	}
	return settledIn(d, n)
}
