package machinedeployment

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A shelf is a cache with these deployments.
type shelf struct {
	client.Reader

	deployments []v1alpha1.MachineDeployment
}

func (s shelf) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	list.(*v1alpha1.MachineDeploymentList).Items = s.deployments

	return nil
}

// series gathers what is registered, as sorted lines.
func series(t *testing.T, registry prometheus.Gatherer) string {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			fmt.Fprintf(&text, "%s{%s} %v\n", f.GetName(), strings.Join(labels, ","), m.GetGauge().GetValue())
		}
	}

	return text.String()
}

func TestInventory(t *testing.T) {
	t.Parallel()
	surge, unavailable := intstr.FromInt32(2), intstr.FromInt32(1)
	d := v1alpha1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "shop", CreationTimestamp: metav1.NewTime(time.Unix(1700000000, 0))},
		Spec: v1alpha1.MachineDeploymentSpec{
			Replicas: 3, Paused: true, RevisionHistoryLimit: new(int32(4)), ProgressDeadlineSeconds: new(int32(600)),
			RollbackTo: &v1alpha1.RollbackConfig{Revision: 7},
			Strategy: v1alpha1.MachineDeploymentStrategy{
				Type: v1alpha1.RollingUpdateMachineDeploymentStrategyType,
				RollingUpdate: &v1alpha1.RollingUpdateMachineDeployment{UpdateConfiguration: v1alpha1.UpdateConfiguration{
					MaxSurge: &surge, MaxUnavailable: &unavailable,
				}},
			},
		},
		Status: v1alpha1.MachineDeploymentStatus{
			Replicas: 5, UpdatedReplicas: 4, ReadyReplicas: 3, AvailableReplicas: 2, UnavailableReplicas: 1,
			Conditions: []v1alpha1.MachineDeploymentCondition{{Type: "Available", Status: "True"}, {Type: "Available", Status: "False"}},
		},
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(NewInventory(t.Context(), shelf{deployments: []v1alpha1.MachineDeployment{d}}))
	const want = `mcm_machine_deployment_info{createdAt="1700000000",name="a",namespace="shop",spec_strategy_type="RollingUpdate"} 1
mcm_machine_deployment_info_spec_min_ready_seconds{name="a",namespace="shop"} 0
mcm_machine_deployment_info_spec_paused{name="a",namespace="shop"} 1
mcm_machine_deployment_info_spec_progress_deadline_seconds{name="a",namespace="shop"} 600
mcm_machine_deployment_info_spec_replicas{name="a",namespace="shop"} 3
mcm_machine_deployment_info_spec_revision_history_limit{name="a",namespace="shop"} 4
mcm_machine_deployment_info_spec_rollback_to_revision{name="a",namespace="shop"} 7
mcm_machine_deployment_info_spec_rolling_update_max_surge{name="a",namespace="shop"} 2
mcm_machine_deployment_info_spec_rolling_update_max_unavailable{name="a",namespace="shop"} 1
mcm_machine_deployment_items_total{} 1
mcm_machine_deployment_status_available_replicas{name="a",namespace="shop"} 2
mcm_machine_deployment_status_condition{condition="Available",name="a",namespace="shop"} 1
mcm_machine_deployment_status_failed_machines{name="a",namespace="shop"} 0
mcm_machine_deployment_status_preserved_failed_replicas{name="a",namespace="shop"} 0
mcm_machine_deployment_status_ready_replicas{name="a",namespace="shop"} 3
mcm_machine_deployment_status_replicas{name="a",namespace="shop"} 5
mcm_machine_deployment_status_unavailable_replicas{name="a",namespace="shop"} 1
mcm_machine_deployment_status_updated_replicas{name="a",namespace="shop"} 4
`
	if diff := cmp.Diff(want, series(t, registry)); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}
