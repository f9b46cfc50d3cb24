// Package v1alpha1 holds the objects that operators apply: Machine, MachineClass, MachineSet and MachineDeployment of
// the group machine.sapcloud.io, with every key and text on them that other programs match.
//
// The group is the one of the Gardener machine controller manager (MCM). Kinds, field names, labels, annotations, phases
// and texts are a contract with its users: manifests, dashboards, the cluster-autoscaler and scripts made for it keep
// working, odd names included. Values carry no defaults and no enumerations in the schema, because that contract has
// none: defaults are applied by the controllers when a value is used and never written back.
//
// CEL rules on the CRDs refuse only what the controllers of this API group never acted on, or cannot even read: an invalid
// duration makes every Machine unreadable to an informer. Each rule stands on the narrowest field. So ratcheting
// (Kubernetes 1.30 and later) leaves objects from before the rules alone until that field changes. Two checks stay with
// the controllers: selectors that do not fit the template, because a rule cannot look into metadata of unknown shape, and
// classes of other kinds.
//
// The package holds data only. It neither validates nor decides; that is for the controllers. It imports the Kubernetes
// API machinery and nothing else, so that clients of the objects need not link a controller framework.
//
// The CRDs in deploy/crds and the deep copies here are generated from these types: run make generate after a change.
//
// +kubebuilder:object:generate=true
// +groupName=machine.sapcloud.io
package v1alpha1
