package install

import (
	"context"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// TestManifests has the API server check, without storing it, what kustomize
// makes of every folder.
func TestManifests(t *testing.T) {
	t.Parallel()
	ensureNamespaces(t)
	dirs := kustomizations(t)
	const atLeast = 8
	if len(dirs) < atLeast {
		t.Fatalf("found only %d kustomizations below %s: %v", len(dirs), deployDir, dirs)
	}
	for _, dir := range dirs {
		t.Run(strings.TrimPrefix(dir, deployDir+"/"), func(t *testing.T) {
			t.Parallel()
			text := build(t, dir)
			if strings.Contains(string(text), "$patch") {
				t.Error("a directive of a strategic merge patch was left in the result")
			}
			if strings.HasSuffix(dir, "/mcm") {
				return // only a part, which no API server would take
			}
			out, err := kubectl(t, text, "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
			if err != nil {
				t.Fatalf("the API server does not take it: %v", err)
			}
			if !strings.Contains(string(out), "serverside-applied") {
				t.Errorf("kubectl applied nothing: %q", out)
			}
		})
	}
}

// TestPodsAreRestricted has the API server check the pods against Pod Security's
// strictest level, to which their namespaces hold them.
func TestPodsAreRestricted(t *testing.T) {
	t.Parallel()
	ensureNamespaces(t)
	tests := map[string]struct {
		dir, kind, name, namespace string
		grace                      time.Duration // at least
		reason                     string
	}{
		"mcm with embedded NATS": {
			"kustomize/install", "Deployment", "mcm", "machinebus", 30 * time.Second,
			"the lease is handed over and the store closed",
		},
		"mcm with external NATS": {
			"kustomize/install-external-nats", "Deployment", "mcm", "machinebus", 30 * time.Second,
			"the lease is handed over",
		},
		"driver": {
			"kustomize/install", "Deployment", "driver-virtual", "machinebus", 11 * time.Minute,
			"--drain-timeout is 10 minutes, and what is cancelled then must still be reported",
		},
		"driver with external NATS": {
			"kustomize/install-external-nats", "Deployment", "driver-virtual", "machinebus", 11 * time.Minute,
			"the same",
		},
		"gateway": {
			"kustomize/autoscaler", "Deployment", "mcm-autoscaler", "machinebus", 12 * time.Second,
			"it lets what runs end, within 10 s",
		},
		"gateway with external NATS": {
			"kustomize/autoscaler-bus", "Deployment", "mcm-autoscaler", "machinebus", 12 * time.Second,
			"the same",
		},
		"gateway with embedded NATS": {
			"kustomize/autoscaler-embedded-bus", "Deployment", "mcm-autoscaler", "machinebus", 12 * time.Second,
			"the same",
		},
		"cluster-autoscaler": {
			"examples/cluster-autoscaler", "Deployment", "cluster-autoscaler", "machinebus", 12 * time.Second,
			"a loop may be under way",
		},
		"driver of 2018": {
			"examples/driver-2018", "Deployment", "driver-2018", "machinebus", 11 * time.Minute,
			"as for the driver",
		},
		"NATS": {"nats", "StatefulSet", "nats", "machinebus-nats", 40 * time.Second, "lame duck mode takes 10 s and 30 s"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			list := objects(t, test.dir)
			var template corev1.PodTemplateSpec
			if test.kind == "Deployment" {
				template = typed[appsv1.Deployment](t, list, test.kind, test.name).Spec.Template
			} else {
				set := typed[appsv1.StatefulSet](t, list, test.kind, test.name)
				template = set.Spec.Template
				for _, claim := range set.Spec.VolumeClaimTemplates { // become volumes of the Pod
					template.Spec.Volumes = append(template.Spec.Volumes, corev1.Volume{Name: claim.Name})
				}
			}
			pod := &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
			pod.GenerateName, pod.Namespace = test.name+"-", test.namespace
			pod.Spec.ServiceAccountName = "" // it does not exist here
			if err := shared.kube.Create(t.Context(), pod, client.DryRunAll); err != nil {
				t.Errorf("the namespace would not let it in: %v", err)
			}
			if got := time.Duration(*pod.Spec.TerminationGracePeriodSeconds) * time.Second; got < test.grace {
				t.Errorf("it has %s to end, want at least %s: %s", got, test.grace, test.reason)
			}
			for _, c := range template.Spec.Containers {
				if ro := c.SecurityContext.ReadOnlyRootFilesystem; ro == nil || !*ro {
					t.Errorf("container %s may write to its root filesystem", c.Name)
				}
				if c.ReadinessProbe == nil || c.LivenessProbe == nil {
					t.Errorf("container %s is not probed", c.Name)
				}
			}
		})
	}
}

// TestFlagsAreKnown has our programs read the arguments that the folders give them.
func TestFlagsAreKnown(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, dir := range kustomizations(t) {
		dir = strings.TrimPrefix(dir, deployDir+"/")
		list := objects(t, dir)
		for _, o := range list {
			if o.GetKind() != "Deployment" {
				continue
			}
			for _, c := range typed[appsv1.Deployment](t, list, o.GetKind(), o.GetName()).Spec.Template.Spec.Containers {
				image, ours := strings.CutPrefix(c.Image, "machinebus/")
				if !ours {
					continue
				}
				program, _, _ := strings.Cut(image, ":")
				seen[dir+" "+program] = true
				args := append(slices.Clone(c.Args), "--help") // which is read last, and has the program end
				if out, err := exec.CommandContext(t.Context(), filepath.Join(shared.bin, program), args...).CombinedOutput(); err != nil {
					t.Errorf("%s: %s %v: %v\n%s", dir, program, args, err, out)
				}
			}
		}
	}
	for _, want := range []string{
		"kustomize/install mcm", "kustomize/install driver-virtual", "kustomize/autoscaler mcm-autoscaler", "kustomize/autoscaler-bus mcm-autoscaler",
		"examples/driver-2018 mcm-grpc-bridge",
	} {
		if !seen[want] {
			t.Errorf("%s was not seen", want)
		}
	}
}

// TestExampleAutoscalerRoles asks for what the priority expander does: it lists the
// ConfigMaps of its namespace, and needs the one of its own.
func TestExampleAutoscalerRoles(t *testing.T) {
	t.Parallel()
	rights := granted(t, objects(t, "examples/cluster-autoscaler"))
	for _, asked := range []right{
		{Resource: "core/configmaps", Verb: "list"},
		{Resource: "core/configmaps", Verb: "watch"},
		{Resource: "core/configmaps", Verb: "create"},
		{Resource: "core/configmaps", Name: "cluster-autoscaler-status", Verb: "update"},
	} {
		asked.Namespace = namespace
		if !slices.ContainsFunc(rights, func(g right) bool { return g.covers(asked) }) {
			t.Errorf("nothing grants %+v", asked)
		}
	}
}

// TestManagersWithOneStoreNeverOverlap guards what would corrupt a JetStream
// store.
func TestManagersWithOneStoreNeverOverlap(t *testing.T) {
	t.Parallel()
	mcm := typed[appsv1.Deployment](t, objects(t, "kustomize/install"), "Deployment", "mcm")
	if *mcm.Spec.Replicas != 1 || mcm.Spec.Strategy.Type != appsv1.RecreateDeploymentStrategyType {
		t.Errorf("%d replicas with strategy %q, want one with Recreate: two servers would open one store",
			*mcm.Spec.Replicas, mcm.Spec.Strategy.Type)
	}
	mcm = typed[appsv1.Deployment](t, objects(t, "kustomize/install-external-nats"), "Deployment", "mcm")
	if *mcm.Spec.Replicas < 2 {
		t.Errorf("%d replicas with an external NATS, want at least 2", *mcm.Spec.Replicas)
	}
}

// TestDriversReachAManagerThatIsNotReady keeps drivers on the NATS server in mcm while mcm
// is not ready, as with a full disk: what they have goes on.
func TestDriversReachAManagerThatIsNotReady(t *testing.T) {
	t.Parallel()
	for _, dir := range []string{"kustomize/install", "kustomize/install-two-clusters/control"} {
		if !typed[corev1.Service](t, objects(t, dir), "Service", "mcm").Spec.PublishNotReadyAddresses {
			t.Errorf("%s: the Service mcm leads to no mcm that is not ready", dir)
		}
	}
}

// ensureNamespaces makes the namespaces as deploy/ has them, and what admission
// wants to find there.
func ensureNamespaces(t *testing.T) {
	t.Helper()
	for _, dir := range []string{"kustomize/namespace", "nats"} {
		for _, o := range objects(t, dir) {
			if o.GetKind() != "Namespace" {
				continue
			}
			if err := shared.kube.Create(t.Context(), o); err != nil && !apierrors.IsAlreadyExists(err) {
				t.Fatal(err)
			}
			awaitDefaultAccount(t, o.GetName())
		}
	}
}

// awaitDefaultAccount waits for the ServiceAccount without which a namespace
// takes no Pod.
func awaitDefaultAccount(t *testing.T, namespace string) {
	t.Helper()
	eventually(t, "namespace "+namespace+" has its default ServiceAccount", func(ctx context.Context) error {
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "default"}}

		return shared.kube.Get(ctx, client.ObjectKeyFromObject(account), account)
	})
}
