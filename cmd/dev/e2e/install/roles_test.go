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

// A right is what one word of a role grants, or what a request needs.
type right struct {
	Role      string // that grants it: kind/name
	Namespace string // empty for the whole cluster
	Resource  string // group/resource/subresource; "core" for the group without name
	Name      string // of the one object; empty for all
	Verb      string
}

// covers reports whether the right allows a request.
func (g right) covers(asked right) bool {
	return g.Resource == asked.Resource && g.Verb == asked.Verb && (g.Name == "" || g.Name == asked.Name) &&
		(g.Namespace == "" || g.Namespace == asked.Namespace)
}

// TestRolesForAllNamespaces compares them with those for one, which tests that run
// mcm hold against its requests.
func TestRolesForAllNamespaces(t *testing.T) {
	t.Parallel()
	one := append(objects(t, "kustomize/control-cluster"), objects(t, "kustomize/target-cluster")...)
	all := append(objects(t, "kustomize/control-cluster-all-namespaces"), objects(t, "kustomize/target-cluster")...)
	allBound(t, one)
	allBound(t, all)
	want := granted(t, one)
	for i := range want {
		if want[i].Role == "Role/mcm" {
			want[i].Role, want[i].Namespace = "ClusterRole/machinebus:mcm", ""
		}
	}
	sortRights(want)
	if diff := gocmp.Diff(want, granted(t, all)); diff != "" {
		t.Errorf("the roles for all namespaces differ from those for one (-one +all):\n%s", diff)
	}
}

// granted lists what the Roles and ClusterRoles among objects grant.
func granted(t *testing.T, list []*unstructured.Unstructured) []right {
	t.Helper()
	var all []right
	for _, o := range list {
		if o.GetKind() != "Role" && o.GetKind() != "ClusterRole" {
			continue
		}
		role := typed[rbacv1.ClusterRole](t, list, o.GetKind(), o.GetName()) // a Role has the same fields
		for _, rule := range role.Rules {
			all = append(all, expand(o, rule)...)
		}
	}
	sortRights(all)

	return all
}

func expand(o *unstructured.Unstructured, rule rbacv1.PolicyRule) []right {
	role := o.GetKind() + "/" + o.GetName()
	names := rule.ResourceNames
	if len(names) == 0 {
		names = []string{""}
	}
	var all []right
	for _, group := range rule.APIGroups {
		for _, resource := range rule.Resources {
			for _, name := range names {
				for _, verb := range rule.Verbs {
					all = append(all, right{role, o.GetNamespace(), cmp.Or(group, "core") + "/" + resource, name, verb})
				}
			}
		}
	}

	return all
}

func sortRights(all []right) {
	slices.SortFunc(all, func(a, b right) int {
		return cmp.Or(strings.Compare(a.Role, b.Role), strings.Compare(a.Resource, b.Resource),
			strings.Compare(a.Name, b.Name), strings.Compare(a.Verb, b.Verb))
	})
}

// allBound checks that each role is bound only to mcm's ServiceAccount.
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
			t.Errorf("%s is not bound", r.Role)
		}
	}
}
