package v1alpha1_test

import (
	"fmt"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// object reads a document for the API server.
func object(t *testing.T, doc string) *unstructured.Unstructured {
	t.Helper()

	return &unstructured.Unstructured{Object: tree(t, []byte(doc))}
}

func TestServerTakesFixtures(t *testing.T) {
	t.Parallel()

	for name, f := range fixtures(t, "testdata/*.yaml", "../../../deploy/examples/machine*.yaml") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			o := object(t, string(f.yaml))
			o.SetNamespace("default")
			if err := apiServer.Create(t.Context(), o, client.DryRunAll); err != nil {
				t.Errorf("existing YAML must apply: %v", err)
			}
		})
	}
}

func TestRules(t *testing.T) {
	t.Parallel()

	const duration = "is no duration: write it with units, such as 90s, 20m or 1h30m"
	const amount = "is no amount: set a number such as 1, or a percentage such as 25%"
	cases := map[string]struct {
		reason string
		// format takes the value; path is the field that the error must name, remedy what it must say.
		kind, format, path, remedy string
		valid, invalid             []string
	}{
		"class of a machine": {
			reason: "Old Go programs write an empty class; half of one is a mistake.",
			kind:   "Machine", format: "spec: {class: %s}", path: "spec.class",
			remedy:  "kind and name belong together: set kind to MachineClass and name to the name of one",
			valid:   []string{"{}", "{kind: MachineClass, name: a}", "{kind: AWSMachineClass, name: a}", `{kind: "", name: ""}`},
			invalid: []string{"{kind: MachineClass}", "{name: a}", `{kind: "", name: a}`, `{kind: MachineClass, name: ""}`},
		},
		"class of a template": {
			reason: "The machines made from it would be invalid.",
			kind:   "MachineDeployment", format: "spec: {template: {spec: {class: %s}}}", path: "spec.template.spec.class",
			remedy:  "kind and name belong together",
			valid:   []string{"{}", "{kind: MachineClass, name: a}"},
			invalid: []string{"{name: a}"},
		},
		"drainTimeout": {
			reason: "One that cannot be read hides all machines of the cluster from a controller.",
			kind:   "Machine", format: "spec: {drainTimeout: %s}", path: "spec.drainTimeout", remedy: duration,
			valid:   []string{"2h", "2h0m0s", "1h30m", ".5s", "1.5h", "100ms", "3us", "3µs", `"0"`, "+5m", "-5m", "null"},
			invalid: []string{"soon", "2 h", "h", "1d", `"20"`, `""`, "1h-30m", "."},
		},
		"healthTimeout": {
			reason: "See drainTimeout.",
			kind:   "MachineSet", format: "spec: {template: {spec: {healthTimeout: %s}}}", path: "spec.template.spec.healthTimeout",
			remedy: duration, valid: []string{"10m"}, invalid: []string{"10 minutes"},
		},
		"creationTimeout": {
			reason: "See drainTimeout.",
			kind:   "Machine", format: "spec: {creationTimeout: %s}", path: "spec.creationTimeout", remedy: duration,
			valid: []string{"20m"}, invalid: []string{"long"},
		},
		"inPlaceUpdateTimeout": {
			reason: "See drainTimeout.",
			kind:   "Machine", format: "spec: {inPlaceUpdateTimeout: %s}", path: "spec.inPlaceUpdateTimeout", remedy: duration,
			valid: []string{"20m"}, invalid: []string{"long"},
		},
		"machinePreserveTimeout": {
			reason: "See drainTimeout.",
			kind:   "Machine", format: "spec: {machinePreserveTimeout: %s}", path: "spec.machinePreserveTimeout", remedy: duration,
			valid: []string{"96h"}, invalid: []string{"4d"},
		},
		"duration of centuries": {
			reason: "Go's durations end after 292 years; the API server words this one.",
			kind:   "Machine", format: "spec: {creationTimeout: %s}", path: "spec.creationTimeout",
			valid: []string{"2562047h"}, invalid: []string{"9999999h"},
		},
		"maxEvictRetries": {
			reason: "A negative number of tries is none.",
			kind:   "Machine", format: "spec: {maxEvictRetries: %s}", path: "spec.maxEvictRetries",
			remedy: "is negative: set 0 or more, or leave it out for the controllers' setting",
			valid:  []string{"0", "10"}, invalid: []string{"-1"},
		},
		"secretRef": {
			reason: "Its machines would boot without user data, or not at all.",
			kind:   "MachineClass", format: "providerSpec: {}, secretRef: %s", path: "secretRef",
			remedy: "names no Secret: set name, or leave secretRef out",
			valid:  []string{"{name: a}", "{name: a, namespace: b}"}, invalid: []string{"{}", "{namespace: b}", `{name: ""}`},
		},
		"credentialsSecretRef": {
			reason: "The driver would be refused by its cloud.",
			kind:   "MachineClass", format: "providerSpec: {}, credentialsSecretRef: %s", path: "credentialsSecretRef",
			remedy: "names no Secret: set name, or leave credentialsSecretRef out",
			valid:  []string{"{name: a}"}, invalid: []string{"{}"},
		},
		"replicas of a set": {
			reason: "Controllers ignore such a set. The API server refuses it by itself, as the scale subresource needs.",
			kind:   "MachineSet", format: "spec: {replicas: %s}", path: "spec.replicas", remedy: "should be a non-negative integer",
			valid: []string{"0", "3"}, invalid: []string{"-1"},
		},
		"replicas of a deployment": {
			reason: "See replicas of a set.",
			kind:   "MachineDeployment", format: "spec: {template: {}, replicas: %s}", path: "spec.replicas",
			remedy: "should be a non-negative integer", valid: []string{"0", "3"}, invalid: []string{"-1"},
		},
		"revisionHistoryLimit": {
			reason: "There cannot be fewer than none.",
			kind:   "MachineDeployment", format: "spec: {template: {}, revisionHistoryLimit: %s}", path: "spec.revisionHistoryLimit",
			remedy: "is negative: set 0 or more, or leave it out to keep all",
			valid:  []string{"0", "10", "null"}, invalid: []string{"-1"},
		},
		"progressDeadlineSeconds": {
			reason: "The rollout would be late before it begins.",
			kind:   "MachineDeployment", format: "spec: {template: {}, progressDeadlineSeconds: %s}", path: "spec.progressDeadlineSeconds",
			remedy: "is negative: set 0 or more, or leave it out for no limit",
			valid:  []string{"0", "600", "null"}, invalid: []string{"-1"},
		},
		"type of strategy": {
			reason: "Controllers ignore a deployment with another one.",
			kind:   "MachineDeployment", format: "spec: {template: {}, strategy: {type: %s}}", path: "spec.strategy.type",
			remedy: "is no strategy: set RollingUpdate, Recreate or InPlaceUpdate",
			valid:  []string{"Recreate", `""`}, invalid: []string{"BlueGreen", "recreate"},
		},
		"rolling update": {
			reason: "Without both limits controllers ignore the deployment. A strategy without a type is left to the controllers, which report it.",
			kind:   "MachineDeployment", format: "spec: {template: {}, strategy: %s}", path: "spec.strategy",
			remedy: "type RollingUpdate needs limits: set rollingUpdate.maxUnavailable and rollingUpdate.maxSurge",
			valid:  []string{"{}", "{type: RollingUpdate, rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}"},
			invalid: []string{
				"{type: RollingUpdate}", "{type: RollingUpdate, rollingUpdate: {}}", "{type: RollingUpdate, rollingUpdate: {maxSurge: 1}}",
				"{type: RollingUpdate, inPlaceUpdate: {maxSurge: 1, maxUnavailable: 1}}",
			},
		},
		"update in place": {
			reason: "See rolling update.",
			kind:   "MachineDeployment", format: "spec: {template: {}, strategy: %s}", path: "spec.strategy",
			remedy: "type InPlaceUpdate needs limits: set inPlaceUpdate.maxUnavailable and inPlaceUpdate.maxSurge",
			valid:  []string{"{type: InPlaceUpdate, inPlaceUpdate: {maxSurge: 0, maxUnavailable: 1, orchestrationType: Auto}}"},
			invalid: []string{
				"{type: InPlaceUpdate}", "{type: InPlaceUpdate, inPlaceUpdate: {maxUnavailable: 1, orchestrationType: Auto}}",
			},
		},
		"maxSurge": {
			reason: "It is added to a number of machines.",
			kind:   "MachineDeployment", format: "spec: {template: {}, strategy: {rollingUpdate: {maxSurge: %s}}}",
			path: "spec.strategy.rollingUpdate.maxSurge", remedy: amount,
			valid: []string{"0", "3", "25%", "0%", "100%"}, invalid: []string{"-1", "few", `"3"`, "-5%", "2.5%", `"%"`},
		},
		"maxUnavailable": {
			reason: "It is subtracted from a number of machines.",
			kind:   "MachineDeployment", format: "spec: {template: {}, strategy: {inPlaceUpdate: {maxUnavailable: %s}}}",
			path: "spec.strategy.inPlaceUpdate.maxUnavailable", remedy: amount,
			valid: []string{"0", "25%"}, invalid: []string{"-1", "few"},
		},
		"orchestrationType": {
			reason: "No controller would select machines for the update.",
			kind:   "MachineDeployment", format: "spec: {template: {}, strategy: {inPlaceUpdate: {orchestrationType: %s}}}",
			path: "spec.strategy.inPlaceUpdate.orchestrationType", remedy: "is no orchestration: set Auto or Manual",
			valid: []string{"Auto", "Manual"}, invalid: []string{"auto", "Random"},
		},
	}
	for name, tc := range cases {
		try := func(t *testing.T, value string) error {
			t.Helper()
			o := object(t, fmt.Sprintf("{apiVersion: machine.sapcloud.io/v1alpha1, kind: %s, metadata: {name: new, namespace: default}, "+
				tc.format+"}", tc.kind, value))

			return apiServer.Create(t.Context(), o, client.DryRunAll)
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			for _, value := range tc.valid {
				if err := try(t, value); err != nil {
					t.Errorf("%s\n%s must be taken, but: %v", tc.reason, value, err)
				}
			}
			for _, value := range tc.invalid {
				err := try(t, value)
				if !apierrors.IsInvalid(err) {
					t.Errorf("%s\n%s must be refused as invalid, got: %v", tc.reason, value, err)

					continue
				}
				if !strings.Contains(err.Error(), tc.path+": Invalid value") || !strings.Contains(err.Error(), tc.remedy) {
					t.Errorf("%s\nthe error for %s must name %s and say %q, got: %v", tc.reason, value, tc.path, tc.remedy, err)
				}
			}
		})
	}
}

// TestRulesLeaveOldObjectsAlone shows that objects from before the rules can live on, and go.
func TestRulesLeaveOldObjectsAlone(t *testing.T) {
	t.Parallel()

	olds, err := oldObjects()
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range olds {
		t.Run(o.GetKind(), func(t *testing.T) {
			t.Parallel()

			patch := func(what, doc string, f func([]byte) error) {
				t.Helper()
				if err := f([]byte(doc)); err != nil {
					t.Errorf("%s: %v", what, err)
				}
			}
			object := func(doc []byte) error {
				return apiServer.Patch(t.Context(), o, client.RawPatch(types.MergePatchType, doc))
			}
			patch("annotate", `{"metadata": {"annotations": {"a": "b"}}}`, object)
			if o.GetKind() != "MachineClass" {
				patch("write the status", `{"status": {"lastOperation": {"description": "x"}, "replicas": 1}}`, func(doc []byte) error {
					return apiServer.Status().Patch(t.Context(), o, client.RawPatch(types.MergePatchType, doc))
				})
				patch("change another field of the spec", `{"spec": {"template": {"spec": {"providerID": "a://b"}}, "providerID": "a://b"}}`, object)
			}
			if err := apiServer.Delete(t.Context(), o); err != nil {
				t.Fatal("delete:", err)
			}
			patch("remove the finalizers", `{"metadata": {"finalizers": null}}`, object)
			if err := apiServer.Get(t.Context(), client.ObjectKeyFromObject(o), o); !apierrors.IsNotFound(err) {
				t.Errorf("it must be gone now, got: %v", err)
			}
		})
	}
}
