package virtual

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk"
)

func newPooled(t *testing.T, knobs cloudapi.Knobs) Pooled {
	t.Helper()
	w := newWorld(t, knobs)
	for _, pool := range []cloudapi.Pool{
		{Name: "own", Max: 3, Cluster: "east"},
		{Name: "others", Max: 3, Cluster: "west"},
		{Name: "shared", Min: 1, Max: 5},
	} {
		pool.MachineType, pool.Region, pool.Zone = "small", "moon", "moon-a"
		if _, err := w.user.PutPool(t.Context(), pool); err != nil {
			t.Fatal(err)
		}
	}

	return Pooled{Cloud: w.user}
}

func TestNodeGroups(t *testing.T) {
	t.Parallel()
	groups, err := newPooled(t, cloudapi.Knobs{}).NodeGroups(t.Context(), "east")
	if err != nil {
		t.Fatal(err)
	}
	type row struct {
		Min, Max, Target int32
		Zone             string
	}
	got := map[string]row{}
	for _, g := range groups {
		got[g.ID] = row{g.Min, g.Max, g.Target, g.Template.Labels["topology.kubernetes.io/zone"]}
	}
	want := map[string]row{"own": {0, 3, 0, "moon-a"}, "shared": {1, 5, 0, "moon-a"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("groups of east (-want +got):\n%s", diff)
	}
}

// Only the driver separates the pools of one cloud by control plane.
func TestGroupsOfOthersAreNotThere(t *testing.T) {
	t.Parallel()
	p := newPooled(t, cloudapi.Knobs{})
	for name, call := range map[string]func(ctx context.Context, group string) error{
		"instances": func(ctx context.Context, group string) error {
			_, err := p.GroupInstances(ctx, "east", group)

			return err
		},
		"resize": func(ctx context.Context, group string) error {
			_, err := p.ResizeGroup(ctx, &driversdk.GroupResize{Cluster: "east", Group: group, RequestID: "r", Target: 1})

			return err
		},
		"delete": func(ctx context.Context, group string) error {
			_, err := p.DeleteFromGroup(ctx, &driversdk.GroupDelete{Cluster: "east", Group: group, RequestID: "d", Instances: []string{"others-1"}})

			return err
		},
	} {
		for _, group := range []string{"others", "none"} {
			if err := call(t.Context(), group); driversdk.CodeOf(err) != driversdk.NotFound {
				t.Errorf("%s of pool %s: %v, want %v", name, group, err, driversdk.NotFound)
			}
		}
	}
}

func TestResizeGroup(t *testing.T) {
	t.Parallel()
	p := newPooled(t, cloudapi.Knobs{Quota: 1})
	for _, step := range []struct {
		reason           string
		id               string
		expected, target int32
		want             int32
		code             driversdk.Code
	}{
		{"grows", "a", 0, 2, 2, driversdk.OK},
		{"the same request again changes nothing", "a", 0, 2, 2, driversdk.OK},
		{"the asker knows an old size", "b", 0, 3, 0, driversdk.Aborted},
		{"above the maximum", "c", 2, 4, 0, driversdk.OutOfRange},
	} {
		got, err := p.ResizeGroup(t.Context(), &driversdk.GroupResize{
			Cluster: "east", Group: "own", RequestID: step.id, Expected: step.expected, Target: step.target,
		})
		if got != step.want || driversdk.CodeOf(err) != step.code {
			t.Errorf("%s: %d, %v; want %d, %v", step.reason, got, err, step.want, step.code)
		}
	}
	// One instance comes, the quota refuses the other: that is what an autoscaler has to see.
	var instances []*driversdk.GroupInstance
	bustest.Eventually(t, "one instance and one refusal", func() bool {
		var err error
		if instances, err = p.GroupInstances(t.Context(), "east", "own"); err != nil {
			t.Fatal(err)
		}
		codes := map[driversdk.Code]int{}
		for _, i := range instances {
			if i.Err != nil || i.State == driversdk.GroupInstanceRunning {
				codes[driversdk.CodeOf(i.Err)]++
			}
		}

		return codes[driversdk.OK] == 1 && codes[driversdk.ResourceExhausted] == 1
	})
	for _, i := range instances {
		if i.Err == nil {
			continue
		}
		left, err := p.DeleteFromGroup(t.Context(), &driversdk.GroupDelete{
			Cluster: "east", Group: "own", RequestID: "d", Instances: []string{i.ID},
		})
		if left != 1 || err != nil {
			t.Errorf("delete of what did not come: %d, %v; want 1", left, err)
		}
	}
}
