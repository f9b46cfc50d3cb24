package machinedeployment_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// startOracle starts Kubernetes' own controllers of Deployments and ReplicaSets,
// which are in the program that etcd of the test's API server is a part of.
func startOracle(kubeconfig []byte) (stop func() error, err error) {
	program, err := filepath.EvalSymlinks(filepath.Join(os.Getenv("KUBEBUILDER_ASSETS"), "etcd"))
	if err != nil {
		return nil, fmt.Errorf("find the dev cluster: %w", err)
	}
	dir, err := os.MkdirTemp("", "oracle")
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(file, kubeconfig, 0o600); err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(program, "kube-controller-manager", "--kubeconfig="+file,
		"--controllers=deployment-controller,replicaset-controller", "--leader-elect=false", "--secure-port=0")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start Kubernetes' controllers (KUBEBUILDER_ASSETS must be made by `devcluster assets`): %w", err)
	}

	return func() error {
		err := cmd.Process.Kill()
		var killed *exec.ExitError
		if waited := cmd.Wait(); !errors.As(waited, &killed) {
			err = errors.Join(err, waited)
		}

		return errors.Join(err, log.Close(), os.RemoveAll(dir))
	}, nil
}

// twin is a Deployment of pods with the limits of a machine deployment. Its pods
// are never scheduled, so that a deleted one is gone at once, and ready when the
// test says so.
func (r *rig) twin(d *v1alpha1.MachineDeployment) *appsv1.Deployment {
	labels := map[string]string{"name": d.Name}
	update := d.Spec.Strategy.RollingUpdate

	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: d.Name},
		Spec: appsv1.DeploymentSpec{
			Replicas: &d.Spec.Replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					SchedulerName: "nobody", Containers: []corev1.Container{{Name: "c", Image: "small"}},
				},
			},
			Strategy: appsv1.DeploymentStrategy{
				Type:          appsv1.RollingUpdateDeploymentStrategyType,
				RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: update.MaxSurge, MaxUnavailable: update.MaxUnavailable},
			},
		},
	}
}

// readyPods marks up to n pods of an image ready that are not yet.
func (r *rig) readyPods(t *testing.T, image string, n int) {
	t.Helper()
	for _, pod := range r.pods(t, image) {
		if n <= 0 {
			return
		}
		if len(pod.Status.Conditions) > 0 {
			continue
		}
		pod.Status.Phase = corev1.PodRunning
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()}}
		if err := r.Status().Update(t.Context(), &pod); err != nil {
			t.Fatal(err)
		}
		n--
	}
}

func (r *rig) pods(t *testing.T, image string) []corev1.Pod {
	t.Helper()
	list := &corev1.PodList{}
	if err := r.List(t.Context(), list, client.InNamespace(r.namespace)); err != nil {
		t.Fatal(err)
	}

	return slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return p.Spec.Containers[0].Image != image })
}

// twinReplicas returns the replicas of the twin's sets by image; nil while they
// are at work.
func (r *rig) twinReplicas(t *testing.T) map[string]int32 {
	t.Helper()
	list := &appsv1.ReplicaSetList{}
	if err := r.List(t.Context(), list, client.InNamespace(r.namespace)); err != nil {
		t.Fatal(err)
	}
	replicas := map[string]int32{}
	for i := range list.Items {
		set := &list.Items[i]
		image := set.Spec.Template.Spec.Containers[0].Image
		if set.Status.Replicas != *set.Spec.Replicas || set.Status.ObservedGeneration != set.Generation ||
			len(r.pods(t, image)) != int(*set.Spec.Replicas) {
			return nil
		}
		replicas[image] = *set.Spec.Replicas
	}

	return replicas
}

// TestOracle rolls a machine deployment and a Deployment of pods out side by side,
// letting one new machine and one new pod come up at a time: each time both come to
// rest with the same replicas, old and new.
func TestOracle(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason             string
		surge, unavailable string
		replicas           int32
		want               string // old+new at rest, with no new one ready, with one, and so on
	}{
		"Both":        {"one more and one less", "1", "1", 4, "3+2 2+3 1+4 0+4 0+4"},
		"Surge":       {"a percentage, rounded up", "25%", "0", 5, "5+2 4+3 3+4 2+5 1+5 0+5"},
		"Unavailable": {"a percentage, rounded down", "0", "50%", 5, "3+2 2+3 1+4 0+5 0+5 0+5"},
		"Percentages": {
			"both of them, as a Deployment has them by default", "25%", "25%", 10,
			"8+5 7+6 6+7 5+8 4+9 3+10 2+10 1+10 0+10 0+10 0+10",
		},
		"All": {"everything at once", "100%", "0", 3, "3+3 2+3 1+3 0+3"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := newOracle(t, tc.surge, tc.unavailable, tc.replicas)
			o.roll(t, "large")
			for ready, want := range strings.Fields(tc.want) {
				o.rest(t, tc.reason, "large", ready, want+"+0")
			}
			o.complete(t, o.ours)
		})
	}
}

// TestOracle_Turns has rollouts that turn aside when one new machine is ready.
func TestOracle_Turns(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason, class string
		ready         int    // machines of that class that are ready already
		want          string // small+large+huge at rest, with so many ready, with one more, and so on
	}{
		"Back":    {"what was not ready yet goes first", "small", 2, "4+1+0 4+0+0 4+0+0"},
		"Further": {"the same, and then the oldest", "huge", 0, "2+1+2 1+1+3 0+1+4 0+0+4 0+0+4"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := newOracle(t, "1", "1", 4)
			o.roll(t, "large")
			o.rest(t, "one more and one less", "large", 1, "2+3+0")
			o.player.release(tc.class, tc.ready)
			o.roll(t, tc.class)
			for i, want := range strings.Fields(tc.want) {
				o.rest(t, tc.reason, tc.class, tc.ready+i, want)
			}
			o.complete(t, o.ours)
		})
	}
}

// An oracle is a machine deployment beside a Deployment of pods with the same
// limits, both complete to begin with.
type oracle struct {
	*rig

	ours   *v1alpha1.MachineDeployment
	theirs *appsv1.Deployment
}

func newOracle(t *testing.T, surge, unavailable string, replicas int32) *oracle {
	t.Helper()
	r := newRig(t)
	r.player = &player{broken: map[string]bool{}, held: map[string]int{"large": 0, "huge": 0}}
	r.start(t)
	o := &oracle{rig: r, ours: r.deployment(replicas, func(d *v1alpha1.MachineDeployment) {
		d.Spec.Strategy.RollingUpdate.MaxSurge = new(intstr.Parse(surge))
		d.Spec.Strategy.RollingUpdate.MaxUnavailable = new(intstr.Parse(unavailable))
	})}
	o.theirs = r.twin(o.ours)
	r.create(t, o.ours)
	r.create(t, o.theirs)
	r.complete(t, o.ours)
	if !poll(t, func() bool { return r.twinReplicas(t)["small"] == replicas }) {
		t.Fatalf("Kubernetes' controllers make no pods")
	}
	r.readyPods(t, "small", int(replicas))
	if !poll(t, func() bool { return r.twinAvailable(t, o.theirs) == replicas }) {
		t.Fatalf("the Deployment does not become available")
	}

	return o
}

// roll changes the template of both. Creation times only order two old sets by whole seconds.
func (o *oracle) roll(t *testing.T, to string) {
	t.Helper()
	now := time.Now()
	if !poll(t, func() bool { return time.Now().Unix() > now.Unix() }) {
		t.Fatal("time stands still")
	}
	o.change(t, o.ours, class(to))
	before := o.theirs.DeepCopy()
	o.theirs.Spec.Template.Spec.Containers[0].Image = to
	if err := o.Patch(t.Context(), o.theirs, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
}

// rest lets so many machines of a class, and as many pods, be ready, and waits until
// both have come to rest with replicas as wanted.
func (o *oracle) rest(t *testing.T, reason, class string, ready int, want string) {
	t.Helper()
	o.player.release(class, ready)
	o.nudge(t)
	var machines, pods map[string]int32
	text := func(replicas map[string]int32) string {
		return fmt.Sprintf("%d+%d+%d", replicas["small"], replicas["large"], replicas["huge"])
	}
	if !poll(t, func() bool {
		o.readyPods(t, class, ready-o.readyCount(t, class))
		machines, pods = o.replicas(t), o.twinReplicas(t)

		return text(machines) == want && text(pods) == want && o.readyCount(t, class) == ready
	}) {
		t.Fatalf("%s: with %d of %s ready, machine sets have %s, replica sets %s, want %s",
			reason, ready, class, text(machines), text(pods), want)
	}
}

func (r *rig) readyCount(t *testing.T, image string) int {
	t.Helper()
	ready := 0
	for _, pod := range r.pods(t, image) {
		if len(pod.Status.Conditions) > 0 {
			ready++
		}
	}

	return ready
}

func (r *rig) twinAvailable(t *testing.T, twin *appsv1.Deployment) int32 {
	t.Helper()
	if err := r.Get(context.WithoutCancel(t.Context()), client.ObjectKeyFromObject(twin), twin); err != nil {
		t.Fatal(err)
	}

	return twin.Status.AvailableReplicas
}
