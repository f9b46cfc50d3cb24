package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/kubetest"
)

// control is the control cluster that the tests share.
var control struct {
	kubeconfig []byte
	client     client.WithWatch
}

func TestMain(m *testing.M) {
	env := kubetest.Environment()
	env.CRDDirectoryPaths = append(env.CRDDirectoryPaths, "testdata/crds")
	kubetest.Main(m, env, func(cfg *rest.Config) (err error) {
		control.kubeconfig = env.KubeConfig
		control.client, err = client.NewWithWatch(cfg, client.Options{Scheme: kubetest.Scheme()})

		return err
	})
}

var pools atomic.Int64

// A testPool is a deployment in a namespace of its own, with two revisions.
type testPool struct {
	*v1alpha1.MachineDeployment

	t     *testing.T
	flags []string
}

func newTestPool(t *testing.T) *testPool {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, control.kubeconfig, 0o600); err != nil {
		t.Fatal(err)
	}
	namespace := fmt.Sprintf("pool-%d", pools.Add(1))
	labels := map[string]string{"name": "pool-a"}
	template := v1alpha1.MachineTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: labels},
		Spec:       v1alpha1.MachineSpec{Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: "class-2"}},
	}
	p := &testPool{
		t: t, flags: []string{"--kubeconfig", file, "--namespace", namespace},
		MachineDeployment: &v1alpha1.MachineDeployment{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "pool-a"},
			Spec:       v1alpha1.MachineDeploymentSpec{Replicas: 3, Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: template},
		},
	}
	p.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
	p.create(p.MachineDeployment)
	for revision := 1; revision <= 2; revision++ {
		old := template.DeepCopy()
		old.Spec.Class.Name = fmt.Sprintf("class-%d", revision)
		old.Labels["machine-template-hash"] = "123"
		p.create(&v1alpha1.MachineSet{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: fmt.Sprintf("pool-a-%d", revision),
				Annotations: map[string]string{
					"deployment.kubernetes.io/revision": fmt.Sprint(revision), "kubernetes.io/change-cause": fmt.Sprintf("cause %d", revision),
				},
				OwnerReferences: []metav1.OwnerReference{
					*metav1.NewControllerRef(p.MachineDeployment, v1alpha1.SchemeGroupVersion.WithKind("MachineDeployment")),
				},
			},
			Spec: v1alpha1.MachineSetSpec{Template: *old},
		})
	}

	return p
}

func (p *testPool) create(o client.Object) {
	p.t.Helper()
	if err := control.client.Create(p.t.Context(), o); err != nil {
		p.t.Fatal(err)
	}
}

func (p *testPool) rollout(args ...string) (string, error) {
	p.t.Helper()
	out, _, err := mcmctl(p.t, append(append([]string{"rollout"}, args...), p.flags...)...)

	return out, err
}

// refresh reads the deployment again.
func (p *testPool) refresh() *v1alpha1.MachineDeployment {
	p.t.Helper()
	if err := control.client.Get(p.t.Context(), client.ObjectKeyFromObject(p.MachineDeployment), p.MachineDeployment); err != nil {
		p.t.Fatal(err)
	}

	return p.MachineDeployment
}

func (p *testPool) report(f func(*v1alpha1.MachineDeploymentStatus)) {
	p.t.Helper()
	d := p.refresh()
	d.Status.ObservedGeneration = d.Generation
	f(&d.Status)
	if err := control.client.Status().Update(p.t.Context(), d); err != nil {
		p.t.Fatal(err)
	}
}

func TestRollout_Changes(t *testing.T) {
	t.Parallel()
	p := newTestPool(t)
	steps := []struct {
		args []string
		want string // in the output, or in the error
		fail bool
	}{
		{[]string{"resume", "pool-a"}, "is not paused", true},
		{[]string{"pause", "mcd/pool-a"}, "paused", false},
		{[]string{"pause", "pool-a"}, "already paused", true},
		{[]string{"restart", "pool-a"}, "resume it first", true},
		{[]string{"undo", "pool-a"}, "resume it first", true},
		{[]string{"resume", "machinedeployment/pool-a"}, "resumed", false},
		{[]string{"undo", "pool-a", "--to-revision", "2"}, "is already at revision 2", false},
		{[]string{"restart", "pool-a"}, "restarted", false},
		{[]string{"undo", "pool-a", "--to-revision", "7"}, "has no revision 7", true},
		{[]string{"undo", "pool-a", "--to-revision", "1"}, "rolled back", false},
		{[]string{"pause", "nosuch"}, "there is no machine deployment nosuch", true},
		{[]string{"pause", "pod/pool-a"}, "is not a machine deployment", true},
	}
	for _, step := range steps {
		out, err := p.rollout(step.args...)
		if step.fail && err != nil {
			out = err.Error()
		}
		if step.fail != (err != nil) || !strings.Contains(out, step.want) {
			t.Errorf("mcmctl rollout %v: want %q, got %q, %v", step.args, step.want, out, err)
		}
	}
	d := p.refresh()
	if d.Spec.RollbackTo == nil || d.Spec.RollbackTo.Revision != 1 {
		t.Errorf("rollbackTo is %v, want revision 1", d.Spec.RollbackTo)
	}
	if at := d.Spec.Template.Annotations["machinebus.io/restarted-at"]; at == "" || d.Spec.Paused {
		t.Errorf("the template was restarted at %q, paused is %v", at, d.Spec.Paused)
	}
}

// TestRollout_ChangeWhileBusy writes the status whenever mcmctl has just read the
// deployment, as mcm does during a rollout.
func TestRollout_ChangeWhileBusy(t *testing.T) {
	t.Parallel()
	p := newTestPool(t)
	left := 3
	busy := interceptor.NewClient(control.client, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			err := c.Get(ctx, key, o, opts...)
			if left > 0 {
				left--
				p.report(func(s *v1alpha1.MachineDeploymentStatus) { s.Replicas++ })
			}

			return err
		},
	})
	d := &deployments{Client: busy, namespace: p.Namespace}
	if err := d.change(t.Context(), "pool-a", pause); err != nil {
		t.Fatal(err)
	}
	if got := p.refresh(); !got.Spec.Paused || got.Status.Replicas != 3 || left != 0 {
		t.Errorf("paused is %v, status %+v; want it paused, and no other change undone", got.Spec.Paused, got.Status)
	}
	if err := d.undo(t.Context(), "pool-a", 1); err == nil || !strings.Contains(err.Error(), "resume it first") {
		t.Errorf("what does not depend on others is no conflict: %v", err)
	}
}

func TestRollout_History(t *testing.T) {
	t.Parallel()
	p := newTestPool(t)
	out, err := p.rollout("history", "pool-a")
	if err != nil {
		t.Fatal(err)
	}
	var cells [][]string
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		cells = append(cells, append(fields[:4:4], strings.Join(fields[5:], " "))) // without the age
	}
	want := [][]string{
		{"REVISION", "MACHINESET", "CLASS", "MACHINES", "CHANGE-CAUSE"},
		{"1", "pool-a-1", "class-1", "0", "cause 1"},
		{"2", "pool-a-2", "class-2", "0", "cause 2"},
	}
	if diff := cmp.Diff(want, cells); diff != "" {
		t.Errorf("history: -want, +got:\n%s", diff)
	}
	out, err = p.rollout("history", "pool-a", "--revision", "1")
	if err != nil || !strings.Contains(out, "name: class-1") || strings.Contains(out, "machine-template-hash") {
		t.Errorf("template of revision 1: %v\n%s", err, out)
	}
	if _, err = p.rollout("history", "pool-a", "--revision", "9"); err == nil {
		t.Error("there is no revision 9, and no error")
	}
	out, _, err = mcmctl(t, append([]string{"__complete", "rollout", "history"}, append(p.flags, "")...)...)
	if err != nil || !strings.HasPrefix(out, "pool-a\n") {
		t.Errorf("names do not complete: %q, %v", out, err)
	}
}

func TestRollout_Status(t *testing.T) {
	t.Parallel()
	p := newTestPool(t)
	progressing := func(s *v1alpha1.MachineDeploymentStatus, status corev1.ConditionStatus, reason, message string) {
		now := metav1.Now()
		s.Conditions = []v1alpha1.MachineDeploymentCondition{{
			Type: "Progressing", Status: status, Reason: reason, Message: message, LastUpdateTime: now, LastTransitionTime: now,
		}}
	}
	out, err := p.rollout("status", "pool-a", "--watch=false")
	if err != nil || !strings.Contains(out, "waiting for mcm to see the change") {
		t.Errorf("before mcm has seen it: %q, %v", out, err)
	}
	for _, tc := range []struct{ reason, message, want string }{
		{"NewMachineSetAvailable", "It has successfully progressed.", "see the change\n"},
		{"MachineSetUpdated", "So far. The last attempt met an error: the policy says no", "see the change - the policy says no\n"},
		{"MachineSetCreateError", "Failed to create new machine set", "see the change - Failed to create new machine set\n"},
	} {
		p.report(func(s *v1alpha1.MachineDeploymentStatus) {
			s.ObservedGeneration = 0
			progressing(s, "True", tc.reason, tc.message)
		})
		if out, err = p.rollout("status", "pool-a", "--watch=false"); err != nil || !strings.HasSuffix(out, tc.want) {
			t.Errorf("before mcm has carried it out: %q, %v, want %q", out, err, tc.want)
		}
	}
	p.report(func(s *v1alpha1.MachineDeploymentStatus) {
		s.Replicas, s.UpdatedReplicas, s.AvailableReplicas = 4, 1, 3
		progressing(s, "True", "MachineSetUpdated", "Machine pool-a-2-x: quota")
	})
	ctx, cancel := context.WithTimeout(t.Context(), bounded)
	defer cancel()
	var follow, errOut output
	done := make(chan error, 1)
	go func() {
		done <- execute(ctx, &follow, &errOut, append([]string{"rollout", "status", "pool-a"}, p.flags...)...)
	}()
	const line = "machine deployment pool-a: 1 of 3 updated, 3 available, 3 old - Machine pool-a-2-x: quota\n"
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for follow.String() != line {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("want %q, got %q", line, follow.String())
		}
	}
	p.report(func(s *v1alpha1.MachineDeploymentStatus) {
		s.Replicas, s.UpdatedReplicas, s.AvailableReplicas = 3, 3, 3
	})
	if err := <-done; err != nil || follow.String() != line+"machine deployment pool-a successfully rolled out\n" {
		t.Errorf("the end of the rollout: %q, %v", follow.String(), err)
	}
	p.report(func(s *v1alpha1.MachineDeploymentStatus) {
		s.AvailableReplicas = 2
		progressing(s, "False", "ProgressDeadlineExceeded", "Machine pool-a-2-x: quota")
	})
	if _, err = p.rollout("status", "pool-a"); err == nil || !strings.Contains(err.Error(), "exceeded its progress deadline: Machine pool-a-2-x: quota") {
		t.Errorf("a rollout that stands still: %v", err)
	}
	p.report(func(s *v1alpha1.MachineDeploymentStatus) {
		progressing(s, "False", "InvalidSpec", "spec.replicas must not be negative")
	})
	if _, err = p.rollout("status", "pool-a"); err == nil || !strings.Contains(err.Error(), "is invalid: spec.replicas must not be negative") {
		t.Errorf("a deployment for which nothing is done: %v", err)
	}
	p.report(func(s *v1alpha1.MachineDeploymentStatus) {
		s.Replicas, s.UpdatedReplicas, s.AvailableReplicas = 3, 3, 3
		progressing(s, "True", "NewMachineSetAvailable", "done")
		c := s.Conditions[0]
		c.Type, c.Reason, c.Message = "ReplicaFailure", "InvalidSpec", "Nothing is done for this set: no class"
		s.Conditions = append(s.Conditions, c)
	})
	if _, err = p.rollout("status", "pool-a"); err == nil || !strings.Contains(err.Error(), "set of machine deployment pool-a is invalid: Nothing is done") {
		t.Errorf("a deployment that cannot roll out: %v", err)
	}
	p.report(func(s *v1alpha1.MachineDeploymentStatus) {
		s.AvailableReplicas = 2
		progressing(s, "True", "MachineSetUpdated", "so far")
		for kind, text := range map[v1alpha1.MachineDeploymentConditionType]string{"ReplicaFailure": "quota", "Frozen": "too many machines"} {
			c := s.Conditions[0]
			c.Type, c.Message = kind, text
			s.Conditions = append(s.Conditions, c)
		}
	})
	if out, err = p.rollout("status", "pool-a", "--watch=false"); err != nil || !strings.HasSuffix(out, " - so far - quota - too many machines\n") {
		t.Errorf("what holds it up: %q, %v", out, err)
	}
	p.report(func(s *v1alpha1.MachineDeploymentStatus) { progressing(s, "True", "MachineSetUpdated", "") })
	if _, err = p.rollout("status", "pool-a", "--timeout", "10ms"); err == nil || !strings.Contains(err.Error(), "did not end within 10ms") {
		t.Errorf("after the timeout: %v", err)
	}
}

// TestRollout_StatusOutlivesOutages has the API server fail while a rollout is
// followed.
func TestRollout_StatusOutlivesOutages(t *testing.T) {
	t.Parallel()
	outage := apierrors.NewServiceUnavailable("etcd has no leader")
	for name, tc := range map[string]struct {
		reason  string
		answers []error // to the first requests
		want    []string
		err     string
	}{
		"in the middle": {
			reason: "it comes back", answers: []error{nil, outage, errors.New("connection refused")},
			want: []string{"0 of 3 updated", "etcd has no leader; retrying", "connection refused; retrying", "0 of 3 updated", "successfully rolled out"},
		},
		"from the first": {reason: "it may be the wrong cluster", answers: []error{outage}, err: "etcd has no leader"},
		"removed": {
			reason: "there is nothing to follow", answers: []error{nil, apierrors.NewNotFound(schema.GroupResource{}, "pool-a")},
			want: []string{"0 of 3 updated"}, err: "there is no machine deployment pool-a",
		},
		"forbidden": {
			reason: "retrying does not help", answers: []error{nil, apierrors.NewForbidden(schema.GroupResource{}, "pool-a", nil)},
			want: []string{"0 of 3 updated"}, err: "forbidden",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newTestPool(t)
			p.report(func(s *v1alpha1.MachineDeploymentStatus) {})
			asked := 0
			flaky := interceptor.NewClient(control.client, interceptor.Funcs{
				Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
					asked++
					switch n := asked - 1; {
					case n < len(tc.answers) && tc.answers[n] != nil:
						return tc.answers[n]
					case n > len(tc.answers):
						p.report(func(s *v1alpha1.MachineDeploymentStatus) {
							s.Replicas, s.UpdatedReplicas, s.AvailableReplicas = 3, 3, 3
						})
					}

					return c.Get(ctx, key, o, opts...)
				},
			})
			ctx, cancel := context.WithTimeout(t.Context(), bounded)
			defer cancel()
			var out bytes.Buffer
			err := (&deployments{Client: flaky, namespace: p.Namespace}).follow(ctx, "pool-a", true, &out)
			if (err != nil) != (tc.err != "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("error is %v, want %q: %s", err, tc.err, tc.reason)
			}
			lines := slices.Collect(strings.Lines(out.String()))
			fits := slices.EqualFunc(lines, tc.want, strings.Contains)
			if !fits {
				t.Errorf("printed %q, want %q: %s", lines, tc.want, tc.reason)
			}
		})
	}
}

func TestProgressLine(t *testing.T) {
	t.Parallel()
	const erase = "\r\x1b[K"
	for name, tc := range map[string]struct {
		reason string
		widths []int // one for each text that is new; nil for no terminal
		want   string
	}{
		"file":     {reason: "a line for each change", want: "1 of 3\n1 of 3 - Machine ü: quota\n3 of 3\n"},
		"wide":     {reason: "each over the one before", widths: []int{80, 80, 80}, want: erase + "1 of 3" + erase + "1 of 3 - Machine ü: quota" + erase + "3 of 3\n"},
		"narrowed": {reason: "a line that wraps is not erased", widths: []int{80, 20, 6}, want: erase + "1 of 3" + erase + "1 of 3 - Machine ü…" + erase + "3 of…\n"},
		"unknown":  {reason: "as narrow as most", widths: []int{0, 0, 0}, want: erase + "1 of 3" + erase + "1 of 3 - Machine ü: quota" + erase + "3 of 3\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out strings.Builder
			line := newProgressLine(&out)
			if widths := tc.widths; widths != nil {
				line.width = func() int { w := widths[0]; widths = widths[1:]; return w }
			}
			for _, text := range []string{"1 of 3", "1 of 3 - Machine ü: quota", "1 of 3 - Machine ü: quota", "3 of 3"} {
				line.print(text)
			}
			line.end()
			if diff := cmp.Diff(tc.want, out.String()); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tc.reason, diff)
			}
		})
	}
	var out strings.Builder
	(&progressLine{w: &out, width: func() int { return 80 }}).end()
	if out.Len() > 0 {
		t.Errorf("printed %q where there was no line", out.String())
	}
}
