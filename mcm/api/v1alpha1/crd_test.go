package v1alpha1_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

const crdDir = "../../../deploy/crds"

// crds reads the generated definitions by kind.
func crds(t *testing.T) map[string]*apiextensionsv1.CustomResourceDefinition {
	t.Helper()

	files, err := filepath.Glob(filepath.Join(crdDir, "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]*apiextensionsv1.CustomResourceDefinition{}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.UnmarshalStrict(content, crd); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		found[crd.Spec.Names.Kind] = crd
	}
	return found
}

type column struct {
	Name, Type, JSONPath string
	Priority             int32
}

// surface is what users see of a kind besides its fields.
type surface struct {
	Name, Plural, Singular, ListKind string
	ShortNames                       []string
	Scope                            apiextensionsv1.ResourceScope
	Versions                         []string
	Columns                          []column
	Subresources                     *apiextensionsv1.CustomResourceSubresources
}

func surfaceOf(crd *apiextensionsv1.CustomResourceDefinition) surface {
	s := surface{
		Name:       crd.Name,
		Plural:     crd.Spec.Names.Plural,
		Singular:   crd.Spec.Names.Singular,
		ListKind:   crd.Spec.Names.ListKind,
		ShortNames: crd.Spec.Names.ShortNames,
		Scope:      crd.Spec.Scope,
	}
	for _, v := range crd.Spec.Versions {
		if v.Served && v.Storage {
			s.Versions = append(s.Versions, v.Name)
		}
		for _, c := range v.AdditionalPrinterColumns {
			s.Columns = append(s.Columns, column{Name: c.Name, Type: c.Type, JSONPath: c.JSONPath, Priority: c.Priority})
		}
		s.Subresources = v.Subresources
	}
	return s
}

func TestCRDSurface(t *testing.T) {
	t.Parallel()

	age := column{Name: "Age", Type: "date", JSONPath: ".metadata.creationTimestamp"}
	status := &apiextensionsv1.CustomResourceSubresources{Status: &apiextensionsv1.CustomResourceSubresourceStatus{}}
	statusAndScale := &apiextensionsv1.CustomResourceSubresources{
		Status: &apiextensionsv1.CustomResourceSubresourceStatus{},
		Scale: &apiextensionsv1.CustomResourceSubresourceScale{
			SpecReplicasPath:   ".spec.replicas",
			StatusReplicasPath: ".status.replicas",
		},
	}
	want := map[string]surface{
		v1alpha1.KindMachine: {
			Name: "machines.machine.sapcloud.io", Plural: "machines", Singular: "machine", ListKind: "MachineList",
			ShortNames: []string{"mc"},
			Columns: []column{
				{Name: "Status", Type: "string", JSONPath: ".status.currentStatus.phase"},
				age,
				{Name: "Node", Type: "string", JSONPath: ".metadata.labels.node"},
				{Name: "ProviderID", Type: "string", JSONPath: ".spec.providerID", Priority: 1},
				{Name: "Class", Type: "string", JSONPath: ".spec.class.name", Priority: 1},
				{Name: "Operation", Type: "string", JSONPath: ".status.lastOperation.type", Priority: 1},
				{Name: "State", Type: "string", JSONPath: ".status.lastOperation.state", Priority: 1},
				{Name: "Code", Type: "string", JSONPath: ".status.lastOperation.errorCode", Priority: 1},
				{Name: "Message", Type: "string", JSONPath: ".status.lastOperation.description", Priority: 1},
			},
			Subresources: status,
		},
		v1alpha1.KindMachineClass: {
			Name: "machineclasses.machine.sapcloud.io", Plural: "machineclasses", Singular: "machineclass", ListKind: "MachineClassList",
			ShortNames: []string{"mcc"},
		},
		v1alpha1.KindMachineSet: {
			Name: "machinesets.machine.sapcloud.io", Plural: "machinesets", Singular: "machineset", ListKind: "MachineSetList",
			ShortNames: []string{"mcs"},
			Columns: []column{
				{Name: "Desired", Type: "integer", JSONPath: ".spec.replicas"},
				{Name: "Current", Type: "integer", JSONPath: ".status.replicas"},
				{Name: "Ready", Type: "integer", JSONPath: ".status.readyReplicas"},
				age,
				{Name: "Available", Type: "integer", JSONPath: ".status.availableReplicas", Priority: 1},
				{Name: "Class", Type: "string", JSONPath: ".spec.template.spec.class.name", Priority: 1},
				{Name: "Frozen", Type: "string", JSONPath: ".metadata.labels.freeze", Priority: 1},
				{Name: "Failure", Type: "string", JSONPath: `.status.machineSetCondition[?(@.type=="ReplicaFailure")].message`, Priority: 1},
				{Name: "Failed", Type: "string", JSONPath: ".status.failedMachines[0].name", Priority: 1},
				{Name: "Message", Type: "string", JSONPath: ".status.failedMachines[0].lastOperation.description", Priority: 1},
			},
			Subresources: statusAndScale,
		},
		v1alpha1.KindMachineDeployment: {
			Name: "machinedeployments.machine.sapcloud.io", Plural: "machinedeployments", Singular: "machinedeployment", ListKind: "MachineDeploymentList",
			ShortNames: []string{"mcd"},
			Columns: []column{
				{Name: "Ready", Type: "integer", JSONPath: ".status.readyReplicas"},
				{Name: "Desired", Type: "integer", JSONPath: ".spec.replicas"},
				{Name: "Up-to-date", Type: "integer", JSONPath: ".status.updatedReplicas"},
				{Name: "Available", Type: "integer", JSONPath: ".status.availableReplicas"},
				age,
				{Name: "Class", Type: "string", JSONPath: ".spec.template.spec.class.name", Priority: 1},
				{Name: "Paused", Type: "boolean", JSONPath: ".spec.paused", Priority: 1},
				{Name: "Frozen", Type: "string", JSONPath: ".metadata.labels.freeze", Priority: 1},
				{Name: "Failure", Type: "string", JSONPath: `.status.conditions[?(@.type=="ReplicaFailure")].message`, Priority: 1},
				{Name: "Progress", Type: "string", JSONPath: `.status.conditions[?(@.type=="Progressing")].reason`, Priority: 1},
				{Name: "Message", Type: "string", JSONPath: `.status.conditions[?(@.type=="Progressing")].message`, Priority: 1},
			},
			Subresources: statusAndScale,
		},
	}
	got := map[string]surface{}
	for kind, crd := range crds(t) {
		got[kind] = surfaceOf(crd)
	}
	for kind, s := range want {
		s.Scope = apiextensionsv1.NamespaceScoped
		s.Versions = []string{v1alpha1.SchemeGroupVersion.Version}
		want[kind] = s
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("kubectl, scripts and the autoscaler rely on these (-want +got):\n%s", diff)
	}
}
