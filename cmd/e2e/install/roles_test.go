package install

import (
	"cmp"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// A request is one kind of request of mcm to an API server.
type request struct {
	Role     string // that grants it: kind/name
	Resource string // group/resource/subresource; "core" for the group without name
	Name     string // of the one object, if it is always the same
	Verb     string
}

// requests lists all that mcm asks of API servers, with what for. It is the
// roles' specification: they grant this and nothing else.
func requests(machines string) map[request]string {
	const (
		own, identity  = "Role/mcm-own", "ClusterRole/machinebus:cluster-uid"
		target, tokens = "ClusterRole/machinebus:target", "Role/machinebus:bootstrap-tokens"
		group          = "machine.sapcloud.io/"
		lease, key     = "machine-controller-manager", "machinebus-control-plane-key"
	)

	return map[request]string{
		{machines, group + "machines", "", "get"}:                         "cache",
		{machines, group + "machines", "", "list"}:                        "cache",
		{machines, group + "machines", "", "watch"}:                       "cache",
		{machines, group + "machines", "", "patch"}:                       "finalizer, journal, labels, providerID",
		{machines, group + "machines", "", "create"}:                      "by their sets",
		{machines, group + "machines", "", "delete"}:                      "by their sets; a Machine whose Node was deleted goes too",
		{machines, group + "machines/status", "", "patch"}:                "phase, lastOperation, conditions",
		{machines, group + "machinesets", "", "get"}:                      "cache; before machines are created or deleted",
		{machines, group + "machinesets", "", "list"}:                     "cache",
		{machines, group + "machinesets", "", "watch"}:                    "cache",
		{machines, group + "machinesets", "", "create"}:                   "by their deployments",
		{machines, group + "machinesets", "", "delete"}:                   "by their deployments",
		{machines, group + "machinesets", "", "patch"}:                    "finalizer, freeze, replicas, annotations",
		{machines, group + "machinesets/status", "", "patch"}:             "replicas, conditions",
		{machines, group + "machinesets/finalizers", "", "update"}:        "to hold up a set's deletion, where that is enforced",
		{machines, group + "machinedeployments", "", "get"}:               "cache",
		{machines, group + "machinedeployments", "", "list"}:              "cache",
		{machines, group + "machinedeployments", "", "watch"}:             "cache",
		{machines, group + "machinedeployments", "", "patch"}:             "finalizer, freeze, revision, rollback",
		{machines, group + "machinedeployments/finalizers", "", "update"}: "to hold up a deployment's deletion, where that is enforced",
		{machines, group + "machinedeployments/status", "", "patch"}:      "replicas, conditions",
		{machines, group + "machineclasses", "", "get"}:                   "cache",
		{machines, group + "machineclasses", "", "list"}:                  "cache",
		{machines, group + "machineclasses", "", "watch"}:                 "cache",
		{machines, group + "machineclasses", "", "patch"}:                 "finalizer, migration",
		{machines, "core/secrets", "", "get"}:                             "cache",
		{machines, "core/secrets", "", "list"}:                            "cache",
		{machines, "core/secrets", "", "watch"}:                           "cache",
		{machines, "core/secrets", "", "patch"}:                           "finalizer",
		{machines, "core/events", "", "create"}:                           "Events of Machines",
		{machines, "core/events", "", "patch"}:                            "an Event that happened again",
		{own, "coordination.k8s.io/leases", "", "create"}:                 "leader election, first time",
		{own, "coordination.k8s.io/leases", lease, "get"}:                 "leader election",
		{own, "coordination.k8s.io/leases", lease, "update"}:              "leader election",
		{own, "core/events", "", "create"}:                                "who leads",
		{own, "core/events", "", "patch"}:                                 "who leads, again",
		{own, "core/secrets", "", "create"}:                               "the sealing key, first time",
		{own, "core/secrets", key, "get"}:                                 "the sealing key",
		{identity, "core/namespaces", "kube-system", "get"}:               "the control cluster's uid",

		{target, "core/nodes", "", "get"}:                          "cache",
		{target, "core/nodes", "", "list"}:                         "cache",
		{target, "core/nodes", "", "watch"}:                        "cache",
		{target, "core/nodes", "", "patch"}:                        "finalizer, label, template, cordon, taints and annotations in rollouts and of what is preserved",
		{target, "core/nodes", "", "delete"}:                       "the Node of an instance that is gone",
		{target, "core/nodes/status", "", "patch"}:                 "conditions, virtual capacity",
		{target, "core/pods", "", "get"}:                           "drain: is it gone yet",
		{target, "core/pods", "", "list"}:                          "drain: pods of the node",
		{target, "core/pods", "", "delete"}:                        "forced drain",
		{target, "core/pods/eviction", "", "create"}:               "drain",
		{target, "apps/daemonsets", "", "get"}:                     "drain: pods that stay",
		{target, "policy/poddisruptionbudgets", "", "get"}:         "drain: why an eviction is refused",
		{target, "policy/poddisruptionbudgets", "", "list"}:        "drain: why an eviction is refused",
		{target, "core/persistentvolumeclaims", "", "get"}:         "drain: volumes of a pod",
		{target, "core/persistentvolumes", "", "get"}:              "drain: volumes of a pod",
		{target, "storage.k8s.io/volumeattachments", "", "get"}:    "drain: volumes still attached",
		{target, "storage.k8s.io/volumeattachments", "", "list"}:   "drain: volumes still attached",
		{target, "storage.k8s.io/volumeattachments", "", "delete"}: "forced drain",
		{tokens, "core/secrets", "", "get"}:                        "bootstrap token: reuse",
		{tokens, "core/secrets", "", "create"}:                     "bootstrap token",
		{tokens, "core/secrets", "", "patch"}:                      "bootstrap token: renewal",
		{tokens, "core/secrets", "", "delete"}:                     "bootstrap token: the node has joined",
	}
}

func TestRolesGrantWhatIsNeededAndNothingElse(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		dirs     []string
		machines string // the role for Machines
		reason   string
	}{
		"one namespace": {
			dirs: []string{"kustomize/control-cluster", "kustomize/target-cluster"}, machines: "Role/mcm",
			reason: "a Role ends at its namespace",
		},
		"all namespaces": {
			dirs: []string{"kustomize/control-cluster-all-namespaces", "kustomize/target-cluster"}, machines: "ClusterRole/machinebus:mcm",
			reason: "the same rules for the whole cluster",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var list []*unstructured.Unstructured
			for _, dir := range test.dirs {
				list = append(list, objects(t, dir)...)
			}
			var want []request
			for r := range requests(test.machines) {
				want = append(want, r)
			}
			sortRequests(want)
			if diff := gocmp.Diff(want, granted(t, list)); diff != "" {
				t.Errorf("the roles differ from the requests (%s; -needed +granted):\n%s", test.reason, diff)
			}
			allBound(t, list)
		})
	}
}

// granted lists what the Roles and ClusterRoles among objects grant.
func granted(t *testing.T, list []*unstructured.Unstructured) []request {
	t.Helper()
	var all []request
	for _, o := range list {
		if o.GetKind() != "Role" && o.GetKind() != "ClusterRole" {
			continue
		}
		role := typed[rbacv1.ClusterRole](t, list, o.GetKind(), o.GetName()) // a Role has the same fields
		for _, rule := range role.Rules {
			all = append(all, expand(o.GetKind()+"/"+o.GetName(), rule)...)
		}
	}
	sortRequests(all)

	return all
}

func expand(role string, rule rbacv1.PolicyRule) []request {
	names := rule.ResourceNames
	if len(names) == 0 {
		names = []string{""}
	}
	var all []request
	for _, group := range rule.APIGroups {
		for _, resource := range rule.Resources {
			for _, name := range names {
				for _, verb := range rule.Verbs {
					all = append(all, request{role, cmp.Or(group, "core") + "/" + resource, name, verb})
				}
			}
		}
	}

	return all
}

func sortRequests(all []request) {
	slices.SortFunc(all, func(a, b request) int {
		return cmp.Or(strings.Compare(a.Role, b.Role), strings.Compare(a.Resource, b.Resource),
			strings.Compare(a.Name, b.Name), strings.Compare(a.Verb, b.Verb))
	})
}

// allBound checks that each role is bound to mcm's ServiceAccount and to nobody
// else.
func allBound(t *testing.T, list []*unstructured.Unstructured) {
	t.Helper()
	bound := map[string]bool{}
	for _, o := range list {
		if o.GetKind() != "RoleBinding" && o.GetKind() != "ClusterRoleBinding" {
			continue
		}
		binding := typed[rbacv1.ClusterRoleBinding](t, list, o.GetKind(), o.GetName())
		bound[binding.RoleRef.Kind+"/"+binding.RoleRef.Name] = true
		want := []rbacv1.Subject{{Kind: "ServiceAccount", Name: "mcm", Namespace: "machinebus"}}
		if diff := gocmp.Diff(want, binding.Subjects); diff != "" {
			t.Errorf("%s %s: subjects (-want +got):\n%s", o.GetKind(), o.GetName(), diff)
		}
	}
	for _, r := range granted(t, list) {
		if !bound[r.Role] {
			t.Errorf("%s is bound to nobody", r.Role)
		}
	}
}
