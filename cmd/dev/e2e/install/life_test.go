package install

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/bootstrap"
)

// workload is the namespace of the pods on machines: that of mcm takes restricted
// ones only.
const workload = "default"

// quick makes mcm do soon what it does after minutes by default.
var quick = []string{
	"--machine-safety-orphan-vms-period=500ms", "--machine-safety-orphan-vms-grace=2s", "--retry-short=500ms", "--retry-medium=500ms",
}

// everything has mcm do all that it ever does: for this its roles must be enough,
// and all of them be needed.
func (r *rig) everything() {
	r.Helper()
	r.createClass("small", tokenUserData)
	r.fleet("small")
	r.guarded("small")
	r.retried("small")
	r.preserved("small")
	r.orphan("small")
	r.deleteClass("small")
}

// fleet has a MachineDeployment scaled, rolled out, with a pod to evict, and deleted.
func (r *rig) fleet(class string) {
	r.Helper()
	list, err := stack.LoadYAML(deployDir + "/examples/pool/machinedeployment.yaml")
	r.must(err)
	d := &v1alpha1.MachineDeployment{}
	r.must(runtime.DefaultUnstructuredConverter.FromUnstructured(list[0].Object, d))
	d.Namespace, d.Spec.Template.Spec.Class.Name = namespace, class
	d.Spec.RevisionHistoryLimit = new(int32) // old sets go at once
	r.must(shared.kube.Create(r.Context(), d))
	r.settled(d)
	r.createPod(r.machines(d)[0].Labels[v1alpha1.LabelKeyNode], nil)
	r.change(d, func() { d.Spec.Replicas++ })
	r.settled(d)
	r.change(d, func() { d.Spec.Template.Annotations = map[string]string{"test/rolled": "out"} })
	r.settled(d)
	r.eventually("there is one set", func(ctx context.Context) error {
		sets := &v1alpha1.MachineSetList{}
		err := shared.kube.List(ctx, sets, client.InNamespace(namespace))
		if err == nil && len(sets.Items) != 1 {
			err = fmt.Errorf("there are %d", len(sets.Items))
		}

		return err
	})
	r.must(shared.kube.Delete(r.Context(), d))
	r.gone(d)
}

func (r *rig) machines(d *v1alpha1.MachineDeployment) []v1alpha1.Machine {
	r.Helper()
	list := &v1alpha1.MachineList{}
	r.must(shared.kube.List(r.Context(), list, client.InNamespace(namespace), client.MatchingLabels(d.Spec.Selector.MatchLabels)))

	return list.Items
}

func (r *rig) settled(d *v1alpha1.MachineDeployment) {
	r.Helper()
	r.eventually(fmt.Sprintf("there are %d machines of the template", d.Spec.Replicas), func(ctx context.Context) error {
		if err := shared.kube.Get(ctx, client.ObjectKeyFromObject(d), d); err != nil {
			return err
		}
		s, n := d.Status, d.Spec.Replicas
		if s.ObservedGeneration != d.Generation || s.Replicas != n || s.AvailableReplicas != n || s.UpdatedReplicas != n {
			return fmt.Errorf("status is %+v", s)
		}

		return nil
	})
}

// guarded has a machine drained on which there are a pod of a DaemonSet, one that
// may not be evicted, and a volume, first in order and then by force.
func (r *rig) guarded(class string) {
	r.Helper()
	m := r.newMachine("guarded", class)
	r.run(m)
	node := m.Labels[v1alpha1.LabelKeyNode]
	app := map[string]string{"app": "guarded"}
	r.createPod(node, app)
	meta := metav1.ObjectMeta{Namespace: workload, Name: "guarded"}
	one := intstr.FromInt32(1)
	daemons := map[string]string{"app": "daemons"}
	volume := "none"
	created := []client.Object{
		&policyv1.PodDisruptionBudget{
			ObjectMeta: *meta.DeepCopy(),
			Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: &one, Selector: &metav1.LabelSelector{MatchLabels: app}},
		},
		&appsv1.DaemonSet{ObjectMeta: *meta.DeepCopy(), Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: daemons},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: daemons}, Spec: podSpec("")},
		}},
		&storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: "guarded"}, Spec: storagev1.VolumeAttachmentSpec{
			Attacher: "test", NodeName: node, Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &volume},
		}},
	}
	for _, o := range created {
		r.must(shared.kube.Create(r.Context(), o))
	}
	r.eventually("the DaemonSet has a pod on the node", func(ctx context.Context) error {
		pods := &corev1.PodList{}
		err := shared.kube.List(ctx, pods, client.InNamespace(workload), client.MatchingLabels(daemons))
		if err == nil && !slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return p.Spec.NodeName == node }) {
			err = fmt.Errorf("none of its %d", len(pods.Items))
		}

		return err
	})
	r.must(shared.kube.Delete(r.Context(), m))
	r.event(m, "DrainHeldUp", 1)
	r.change(m, func() { metav1.SetMetaDataLabel(&m.ObjectMeta, v1alpha1.LabelKeyForceDeletion, "true") })
	r.gone(m)
	r.gone(created[2])
	for _, o := range created[:2] {
		r.must(shared.kube.Delete(r.Context(), o))
	}
}

// retried makes a machine's creation fail repeatedly, corrupts its token meanwhile, and
// deletes it before it has joined.
func (r *rig) retried(class string) {
	r.Helper()
	m := r.newMachine("retried", class)
	// One that says that nothing was made: any other is not known to be a failure.
	faults := []cloudapi.Fault{{Operation: cloudapi.OpCreate, Name: m.Name, Status: http.StatusServiceUnavailable, Code: cloudapi.CodeUnavailable}}
	_, err := r.cloud.Admin.Patch(r.Context(), cloudapi.KnobsPatch{Faults: &faults})
	r.must(err)
	r.must(shared.kube.Create(r.Context(), m))
	token := &corev1.Secret{}
	r.eventually("it has a token", func(ctx context.Context) error {
		*token, err = r.token(ctx, m)

		return err
	})
	spoiled := "no secret of a token"
	r.change(token, func() { token.Data["token-secret"] = []byte(spoiled) })
	r.eventually("its token is renewed", func(ctx context.Context) error {
		*token, err = r.token(ctx, m)
		if err == nil && string(token.Data["token-secret"]) == spoiled {
			err = errors.New("it is not")
		}

		return err
	})
	r.event(m, "FailedCreate", 2)
	r.must(shared.kube.Delete(r.Context(), m))
	r.gone(m)
	r.gone(token)
}

// token returns a machine's bootstrap token.
func (r *rig) token(ctx context.Context, m *v1alpha1.Machine) (corev1.Secret, error) {
	list := &corev1.SecretList{}
	err := shared.kube.List(ctx, list, client.InNamespace(metav1.NamespaceSystem), client.MatchingLabels{bootstrap.LabelKeyMachineUID: string(m.UID)})
	if err != nil || len(list.Items) == 0 {
		return corev1.Secret{}, errors.Join(errors.New("there is none"), err)
	}

	return list.Items[0], nil
}

// preserved has a machine preserved and, when that is over, deleted.
func (r *rig) preserved(class string) {
	r.Helper()
	m := r.newMachine("preserved", class)
	r.run(m)
	r.change(m, func() {
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.AnnotationKeyPreserve, v1alpha1.PreserveNow)
	})
	r.eventually("the node shows that it is preserved", func(ctx context.Context) error {
		node := &corev1.Node{}
		err := shared.kube.Get(ctx, client.ObjectKey{Name: m.Labels[v1alpha1.LabelKeyNode]}, node)
		if err == nil && !slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == v1alpha1.NodePreserved }) {
			err = errors.New("it does not")
		}

		return err
	})
	r.must(shared.kube.Delete(r.Context(), m))
	r.gone(m)
}

// orphan leaves an instance of the class in the cloud that belongs to no machine.
func (r *rig) orphan(class string) {
	r.Helper()
	witness := r.newMachine("witness", class) // that of the class not all Machines are lost
	r.run(witness)
	r.must(shared.kube.Get(r.Context(), client.ObjectKeyFromObject(r.identity), r.identity))
	cloud, err := cloudapi.NewClient(r.cloud.Endpoint, r.cloud.APIToken)
	r.must(err)
	instance, err := cloud.Create(r.Context(), cloudapi.CreateRequest{
		Name: "orphan", MachineType: "small", Region: "moon", IdempotencyToken: "orphan",
		Tags: map[string]string{
			"machinebus.io/cluster": "default", "machinebus.io/class": namespace + "/" + class,
			cloudapi.TagMachineUID: "orphan-uid", "machinebus.io/machine-name": "orphan", "machinebus.io/owner": string(r.identity.GetUID()),
		},
	})
	r.must(err)
	r.eventually("the instance without a machine is gone", func(ctx context.Context) error {
		_, err := cloud.Get(ctx, instance.ID)
		switch {
		case err == nil:
			return errors.New("it is there")
		case cloudapi.CodeOf(err) == cloudapi.CodeNotFound:
			return nil
		default:
			return err
		}
	})
	r.must(shared.kube.Delete(r.Context(), witness))
	r.gone(witness)
}

func podSpec(node string) corev1.PodSpec {
	return corev1.PodSpec{
		NodeName: node, TerminationGracePeriodSeconds: new(int64), // there is no kubelet to end it
		Containers: []corev1.Container{{Name: "none", Image: "none.invalid/none"}},
	}
}

// createPod makes a pod that runs on a Node, with a claim whose volume a drain asks for.
func (r *rig) createPod(node string, labels map[string]string) {
	r.Helper()
	awaitDefaultAccount(r.T, workload)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: workload, Name: node, Labels: labels}, Spec: podSpec(node)}
	pod.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "none"},
	}}}
	r.must(shared.kube.Create(r.Context(), pod))
	running := client.RawPatch("application/merge-patch+json", []byte(`{"status":{"phase":"Running"}}`))
	r.must(shared.kube.Status().Patch(r.Context(), pod, running))
}

// change changes an object as it is stored.
func (r *rig) change(o client.Object, f func()) {
	r.Helper()
	r.eventually("it can be changed", func(ctx context.Context) error {
		if err := shared.kube.Get(ctx, client.ObjectKeyFromObject(o), o); err != nil {
			return err
		}
		f()

		return shared.kube.Update(ctx, o)
	})
}

// gone waits until an object is not there any more.
func (r *rig) gone(o client.Object) {
	r.Helper()
	left := o.DeepCopyObject().(client.Object)
	r.eventually(fmt.Sprintf("%T %s is gone", o, o.GetName()), func(ctx context.Context) error {
		err := shared.kube.Get(ctx, client.ObjectKeyFromObject(o), left)
		if apierrors.IsNotFound(err) {
			return nil
		}
		err = errors.Join(errors.New("it is there"), err)
		if m, ok := left.(*v1alpha1.Machine); ok {
			err = fmt.Errorf("%w, last operation: %s", err, m.Status.LastOperation.Description)
		}

		return err
	})
}

// event waits for an Event on a machine that was recorded so often at least.
func (r *rig) event(m *v1alpha1.Machine, reason string, times int32) {
	r.Helper()
	r.eventually(fmt.Sprintf("%s has the Event %s, %d times", m.Name, reason, times), func(ctx context.Context) error {
		events := &corev1.EventList{}
		err := shared.kube.List(ctx, events, client.InNamespace(namespace), client.MatchingFields{"involvedObject.uid": string(m.UID)})
		var seen []string
		for i := range events.Items {
			e := &events.Items[i]
			if e.Reason == reason && e.Count >= times {
				return nil
			}
			seen = append(seen, fmt.Sprintf("%d %s: %s", e.Count, e.Reason, e.Message))
		}

		return errors.Join(fmt.Errorf("it has the Events %q", seen), err)
	})
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}
