package drain

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// daemonSet makes a DaemonSet and returns what makes a pod one of its.
func (r *rig) daemonSet(t *testing.T) podOption {
	t.Helper()
	labels := map[string]string{"app": "agent"}
	set, err := r.AppsV1().DaemonSets(r.namespace).Create(t.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "agent"},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "none.invalid/none"}}},
			},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}

	return func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(set, appsv1.SchemeGroupVersion.WithKind("DaemonSet"))}
	}
}

func mirror(p *corev1.Pod) {
	p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "static"}
}

func emptyDir(p *corev1.Pod) {
	p.Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
}

func replicated(p *corev1.Pod) {
	p.OwnerReferences = []metav1.OwnerReference{{
		APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web", UID: "0c2f3a4e", Controller: new(true),
	}}
}

func TestWhatADrainRemoves(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		force  bool
	}{
		"in order": {"mirror pods would come back, those of DaemonSets too", false},
		"by force": {"force is about how pods end, not about which", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, Settings{}, nil)
			r.pod(t, "daemon", r.daemonSet(t))
			r.pod(t, "mirror", mirror)
			other := r.addNode(t, r.node.Name+"-other")
			r.pod(t, "elsewhere", func(p *corev1.Pod) { p.Spec.NodeName = other.Name })
			r.pod(t, "unmanaged")
			r.pod(t, "scratch", emptyDir)
			r.pod(t, "replicated", replicated)
			req := r.request()
			req.Force = tc.force
			r.succeed(t, req)
			r.noticed(t)
			all, _ := r.pods(t)
			if diff := cmp.Diff([]string{"daemon", "elsewhere", "mirror"}, all); diff != "" {
				t.Errorf("pods that are left (%s), -want +got:\n%s", tc.reason, diff)
			}
		})
	}
}

// One pod cannot be classified; that keeps no other from being deleted.
func TestForceWithoutADaemonSet(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{}, func(cfg *rest.Config) {
		cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(req *http.Request) (*http.Response, error) {
				if strings.Contains(req.URL.Path, "/daemonsets/") {
					return nil, errors.New("the API server takes too long")
				}

				return next.RoundTrip(req)
			})
		})
	})
	r.pod(t, "daemon", r.daemonSet(t))
	r.pod(t, "replicated", replicated)
	req := r.request()
	req.Force = true
	r.drainer.Start(req)
	if s := r.done(t); s.Err == nil || !strings.Contains(s.Err.Error(), "the API server takes too long") {
		t.Errorf("the drain ended with %v", s.Err)
	}
	all, _ := r.pods(t)
	if diff := cmp.Diff([]string{"daemon"}, all); diff != "" {
		t.Errorf("pods that are left, -want +got:\n%s", diff)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

func TestNodeCondition(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason       string
		failed       bool
		cause, words string
	}{
		"scale down": {
			"other programs distinguish the two by these words", false,
			"ScaleDown", "Machine Controller is scaling down machine",
		},
		"failed": {
			"other programs distinguish the two by these words", true,
			"Unhealthy", "Machine Controller is terminating failed machine",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, Settings{}, nil)
			req := r.request()
			req.Failed = tc.failed
			r.succeed(t, req)
			node := r.getNode(t)
			if !node.Spec.Unschedulable {
				t.Error("the node is not cordoned")
			}
			conditions := map[corev1.NodeConditionType][3]string{}
			for _, c := range node.Status.Conditions {
				conditions[c.Type] = [3]string{string(c.Status), c.Reason, c.Message}
			}
			if diff := cmp.Diff(map[corev1.NodeConditionType][3]string{
				corev1.NodeReady: {"True", "Test", ""}, "Terminating": {"True", tc.cause, tc.words},
			}, conditions); diff != "" {
				t.Errorf("conditions (%s), -want +got:\n%s", tc.reason, diff)
			}

			r.drainer.Forget(req.UID)
			req.Node, req.Failed = node, !tc.failed
			r.succeed(t, req)
			if again := r.getNode(t); again.ResourceVersion != node.ResourceVersion {
				t.Error("a second drain has written the node although it is as it should be")
			}
		})
	}
}

func (r *rig) getNode(t *testing.T) *corev1.Node {
	t.Helper()
	node, err := r.CoreV1().Nodes().Get(t.Context(), r.node.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}

	return node
}

func TestWaitsForPodsToEnd(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{}, nil)
	pod := r.pod(t, "slow", slowToEnd)
	r.drainer.Start(r.request())
	r.until(t, "says what it waits for", func(s State) bool { return strings.Contains(s.Reason, r.namespace+"/slow") })
	if _, untouched := r.pods(t); len(untouched) > 0 {
		t.Errorf("pods %q were not evicted", untouched)
	}
	if s, _ := r.drainer.State(r.request().UID); s.Phase != Running {
		t.Fatalf("the drain is %+v while a pod still ends", s)
	}
	r.kill(t, pod)
	if s := r.done(t); s.Err != nil {
		t.Error(s.Err)
	}
}

func TestAPodThatCameDuringTheDrain(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{}, nil)
	pod := r.pod(t, "first", slowToEnd)
	r.drainer.Start(r.request())
	r.until(t, "waits for the first pod", func(s State) bool { return s.Reason != "" })
	r.pod(t, "late")
	r.kill(t, pod)
	if s := r.done(t); s.Err != nil {
		t.Fatal(s.Err)
	}
	if all, _ := r.pods(t); len(all) > 0 {
		t.Errorf("pods %q are left on the drained node", all)
	}
}

func TestABudgetIsWaitedFor(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{}, nil)
	r.pod(t, "guarded", labelled("guarded"))
	budget := r.budget(t, "guarded", busy)
	r.drainer.Start(r.request())
	r.noticed(t)
	s := r.until(t, "reports the refusal", func(s State) bool { return strings.Contains(s.Reason, r.namespace+"/guarded") })
	if s.Phase != Running {
		t.Fatalf("the drain is %+v while a budget refuses", s)
	}
	allows := busy
	allows.CurrentHealthy, allows.DisruptionsAllowed = 2, 1
	r.setBudget(t, budget, allows)
	if s := r.done(t); s.Err != nil {
		t.Fatal(s.Err)
	}
	if all, _ := r.pods(t); len(all) > 0 {
		t.Errorf("pods %q are left", all)
	}
}

func TestAMisconfiguredBudget(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{}, nil)
	r.pod(t, "guarded", labelled("guarded"))
	r.pod(t, "free")
	r.budget(t, "guarded", strict)
	r.drainer.Start(r.request())
	s := r.done(t)
	want := "pod disruption budget " + r.namespace + "/guarded is misconfigured and requires zero voluntary evictions"
	if s.Err == nil || !strings.Contains(s.Err.Error(), want) {
		t.Errorf("error is %v, want one with %q", s.Err, want)
	}
	if all, _ := r.pods(t); cmp.Diff([]string{"guarded"}, all) != "" {
		t.Errorf("pods %q are left, want the guarded one only: others are none of its business", all)
	}
}

// The API server asks to come back later. That is not to be done within the
// request, which others wait for.
func TestABudgetThatNoControllerUpdates(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{Requests: 1}, nil)
	r.pod(t, "guarded", labelled("guarded"))
	must(t)(r.PolicyV1().PodDisruptionBudgets(r.namespace).Create(t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "guarded"},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "guarded"}}},
	}, metav1.CreateOptions{}))
	r.drainer.Start(r.request())
	r.noticed(t)
	if got := counted(t, r.drainer, refused); got == 0 {
		t.Error("no eviction was refused")
	}
	if !poll(func() bool { return counted(t, r.drainer, refused) >= 3 }) {
		t.Error("the eviction is not tried again")
	}
}

func TestWhichBudgetsAreMisconfigured(t *testing.T) {
	t.Parallel()
	change := func(f func(b *policyv1.PodDisruptionBudget)) *policyv1.PodDisruptionBudget {
		b := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Generation: 2}, Status: strict}
		b.Status.ObservedGeneration = 2
		f(b)

		return b
	}
	for name, tc := range map[string]struct {
		reason string
		budget *policyv1.PodDisruptionBudget
		want   bool
	}{
		"all well, none allowed": {"nothing will change it", change(func(*policyv1.PodDisruptionBudget) {}), true},
		"not yet seen": {"its status is of an older one", change(func(b *policyv1.PodDisruptionBudget) {
			b.Status.ObservedGeneration = 1
		}), false},
		"no pods": {"its controller has not counted yet", change(func(b *policyv1.PodDisruptionBudget) {
			b.Status.ExpectedPods = 0
		}), false},
		"a pod not well": {"it may become well", change(func(b *policyv1.PodDisruptionBudget) { b.Status.CurrentHealthy = 0 }), false},
		"one is going": {"another may come", change(func(b *policyv1.PodDisruptionBudget) {
			b.Status.DisruptedPods = map[string]metav1.Time{"p": {}}
		}), false},
		"one allowed": {"it was used up by another eviction", change(func(b *policyv1.PodDisruptionBudget) {
			b.Status.DisruptionsAllowed = 1
		}), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := allowsNothing(tc.budget); got != tc.want {
				t.Errorf("misconfigured is %t, want %t: %s", got, tc.want, tc.reason)
			}
		})
	}
}

func TestEvictionsRunOut(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{}, nil)
	r.pod(t, "guarded", labelled("guarded"), slowToEnd)
	r.budget(t, "guarded", busy)
	req := r.request()
	req.MaxEvictRetries = 2
	r.succeed(t, req)
	if all, _ := r.pods(t); len(all) > 0 {
		t.Errorf("pods %q are left after the last retry", all)
	}
	if got := counted(t, r.drainer, refused); got != 3 {
		t.Errorf("%v evictions were refused, want 3: one and two retries", got)
	}
	if got := counted(t, r.drainer, deleted); got != 1 {
		t.Errorf("%v pods were deleted without asking, want 1", got)
	}
}

func TestTheTimeIsOver(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		prep   func(t *testing.T, r *rig)
		want   string
	}{
		"refused": {
			"the budget is what has to be mended",
			func(t *testing.T, r *rig) { t.Helper(); r.budget(t, "held", busy) }, "disruption budget",
		},
		"ending": {
			"the pod is what has to be looked at",
			func(t *testing.T, r *rig) { t.Helper() }, "1 pods left: ",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, Settings{}, nil)
			tc.prep(t, r)
			r.pod(t, "held", labelled("held"), slowToEnd)
			req := r.request()
			req.Timeout = 8 * time.Second // in which even a busy API server refuses once
			r.drainer.Start(req)
			s := r.done(t)
			if s.Err == nil {
				t.Fatal("the drain succeeded although a pod is left")
			}
			for _, want := range []string{r.node.Name, "did not end within 8s", r.namespace + "/held", tc.want} {
				if !strings.Contains(s.Err.Error(), want) {
					t.Errorf("error is %q, want it to hold %q: %s", s.Err, want, tc.reason)
				}
			}
			if strings.Contains(s.Err.Error(), "\n") {
				t.Errorf("error has more than one line: %q", s.Err)
			}
		})
	}
}

func TestANodeThatIsGone(t *testing.T) {
	t.Parallel()
	remove := func(t *testing.T, r *rig) {
		t.Helper()
		if err := r.CoreV1().Nodes().Delete(t.Context(), r.node.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("before", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, Settings{}, nil)
		remove(t, r)
		r.succeed(t, r.request())
	})
	t.Run("in between", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, Settings{}, nil)
		r.pod(t, "stuck", slowToEnd)
		r.drainer.Start(r.request())
		r.until(t, "waits for the pod", func(s State) bool { return s.Reason != "" })
		remove(t, r)
		if s := r.done(t); s.Err != nil {
			t.Error(s.Err)
		}
	})
	for name, tc := range map[string]struct {
		reason        string
		marked, force bool
	}{
		"and another has its name":                {"a new node is none of the drain's business", false, false},
		"and another has its name, by force":      {"force would end its pods at once", false, true},
		"and another has its name, drained again": {"the old node needs no write that could fail", true, false},
		"and another has its name, forced again":  {"the old node needs no write that could fail", true, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, Settings{}, nil)
			req := r.request()
			if tc.marked {
				r.succeed(t, req)
				r.drainer.Forget(req.UID)
				req.Node = r.getNode(t)
			}
			remove(t, r)
			r.addNode(t, r.node.Name)
			r.pod(t, "of-the-new-node")
			req.Force = tc.force
			r.succeed(t, req)
			if node := r.getNode(t); node.Spec.Unschedulable || len(node.Status.Conditions) != 1 {
				t.Errorf("the new node was written (%s): unschedulable %t, conditions %+v", tc.reason, node.Spec.Unschedulable, node.Status.Conditions)
			}
			if _, untouched := r.pods(t); len(untouched) != 1 {
				t.Errorf("the new node's pod was ended: %s", tc.reason)
			}
		})
	}
}

func TestForce(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{}, nil)
	r.pod(t, "guarded", labelled("guarded"))
	r.budget(t, "guarded", strict)
	r.pod(t, "slow", slowToEnd)
	r.attachment(t, r.namespace+"-here", r.node.Name)
	r.attachment(t, r.namespace+"-held", r.node.Name, "test.invalid/attacher")
	r.attachment(t, r.namespace+"-elsewhere", "another-node")
	req := r.request()
	req.Force = true
	if s := r.succeed(t, req); !s.Forced {
		t.Error("the state does not say that the drain was forced")
	}
	if all, _ := r.pods(t); len(all) > 0 {
		t.Errorf("pods %q are left after a forced drain", all)
	}
	for name, want := range map[string]bool{"-here": false, "-held": false, "-elsewhere": true} {
		if got := r.attached(t, r.namespace+name); got != want {
			t.Errorf("volume attachment %s: attached %t, want %t", name, got, want)
		}
	}
}

func TestAnUnforcedDrainKeepsVolumes(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{}, nil)
	r.attachment(t, r.namespace+"-here", r.node.Name)
	r.succeed(t, r.request())
	if !r.attached(t, r.namespace+"-here") {
		t.Error("a volume attachment was deleted; the node can still detach in order")
	}
}

func TestAPodWithAnotherUIDIsSpared(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{}, nil)
	old := r.pod(t, "db-0")
	r.kill(t, old)
	r.pod(t, "db-0")
	for name, end := range map[string]func(*run) error{
		"evict":  func(run *run) error { return newEvictionRound(run, nil, nil).tryEvict(t.Context(), &victim{pod: *old}) },
		"delete": func(run *run) error { return run.delete(t.Context(), old) },
	} {
		err := end(&run{Drainer: r.drainer, req: r.request()})
		if err != nil && !gone(err) {
			t.Errorf("%s: %v, want it to say that the pod is gone", name, err)
		}
		if _, untouched := r.pods(t); len(untouched) != 1 {
			t.Fatalf("%s of the old pod has ended the new one of its name", name)
		}
	}
}

func TestTextOfMisconfiguredBudget(t *testing.T) {
	t.Parallel()
	if !strings.HasSuffix(v1alpha1.TextFormatMisconfiguredPDB, "is misconfigured and requires zero voluntary evictions") {
		t.Error("other programs look for this text")
	}
}
