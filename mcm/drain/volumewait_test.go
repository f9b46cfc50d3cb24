package drain

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// The tests play the controllers that bind, attach and detach volumes.

// volume makes a claim that is bound to a volume, attached to the rig's Node.
func (r *rig) volume(t *testing.T, name string) {
	t.Helper()
	must(t)(r.CoreV1().PersistentVolumeClaims(r.namespace).Create(t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{
			VolumeName: r.volumeName(name), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{"storage": resource.MustParse("1Gi")}},
		},
	}, metav1.CreateOptions{}))
	r.attach(t, name, r.node.Name)
}

// volumeName is the name of the volume of a claim: volumes are in no namespace.
func (r *rig) volumeName(claim string) string { return r.namespace + "-" + claim }

func (r *rig) attach(t *testing.T, claim, node string) {
	t.Helper()
	volume := r.volumeName(claim)
	made, err := r.StorageV1().VolumeAttachments().Create(t.Context(), &storagev1.VolumeAttachment{
		ObjectMeta: metav1.ObjectMeta{Name: volume + "-" + node},
		Spec:       storagev1.VolumeAttachmentSpec{Attacher: "test", NodeName: node, Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &volume}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	made.Status.Attached = true
	must(t)(r.StorageV1().VolumeAttachments().UpdateStatus(t.Context(), made, metav1.UpdateOptions{}))
}

func (r *rig) detach(t *testing.T, claim string) {
	t.Helper()
	if err := r.StorageV1().VolumeAttachments().Delete(t.Context(), r.volumeName(claim)+"-"+r.node.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
}

// mounts makes a pod mount claims.
func mounts(claims ...string) podOption {
	return func(p *corev1.Pod) {
		for _, c := range claims {
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: c, VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: c},
			}})
		}
	}
}

// important gives a pod a priority, by a class of its own.
func (r *rig) important(t *testing.T, value int32) podOption {
	t.Helper()
	class, err := r.SchedulingV1().PriorityClasses().Create(t.Context(), &schedulingv1.PriorityClass{
		ObjectMeta: metav1.ObjectMeta{GenerateName: r.namespace + "-"}, Value: value,
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}

	return func(p *corev1.Pod) { p.Spec.PriorityClassName = class.Name }
}

// saying waits until the drain says what it waits for.
func (r *rig) saying(t *testing.T, text string) {
	t.Helper()
	r.until(t, text, func(s State) bool { return strings.Contains(s.Reason, text) })
}

// wantLeft wants these pods on the drained Node, untouched.
func (r *rig) wantLeft(t *testing.T, want ...string) {
	t.Helper()
	list, err := r.CoreV1().Pods(r.namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for i := range list.Items {
		if p := &list.Items[i]; p.Spec.NodeName == r.node.Name && p.DeletionTimestamp.IsZero() {
			got = append(got, p.Name)
		}
	}
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("pods left on the node (-want +got):\n%s", diff)
	}
}

// Pods with volumes end one after the other, the most important first; each has its volume
// attached elsewhere before the next one ends.
func TestVolumesMoveOneAfterTheOther(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{DetachTimeout: time.Hour, ReattachTimeout: time.Hour}, nil)
	other := r.addNode(t, r.node.Name+"-other")
	for _, claim := range []string{"low", "high"} {
		r.volume(t, claim)
	}
	r.pod(t, "a-low", mounts("low"))
	r.pod(t, "high", mounts("high"), r.important(t, 1000))
	r.pod(t, "web")
	r.drainer.Start(r.request())
	r.saying(t, "volume "+r.volumeName("high")+" of pod "+r.namespace+"/high is still attached")
	r.wantLeft(t, "a-low")

	r.pod(t, "high-next", mounts("high"), func(p *corev1.Pod) { p.Spec.NodeName = other.Name })
	r.detach(t, "high")
	r.saying(t, "not attached to another node yet")
	r.wantLeft(t, "a-low")
	r.attach(t, "high", other.Name)

	r.saying(t, "volume "+r.volumeName("low")+" of pod "+r.namespace+"/a-low is still attached")
	r.detach(t, "low") // no other pod mounts it
	if s := r.done(t); s.Err != nil {
		t.Error(s.Err)
	}
}

// A pod whose eviction is refused keeps no other one from having its volumes moved.
func TestRefusedPodLetsOthersGo(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{EvictRetry: time.Hour}, nil)
	r.volume(t, "first")
	r.volume(t, "second")
	r.pod(t, "first", mounts("first"), r.important(t, 1000), labelled("guarded"))
	r.pod(t, "second", mounts("second"))
	r.budget(t, "guarded", busy)
	r.drainer.Start(r.request())
	r.until(t, "the second pod has ended", func(State) bool { all, _ := r.pods(t); return len(all) == 1 })
	r.wantLeft(t, "first")
}

// The instance must not go with a volume attached: a volume that stays is an error that names it.
func TestVolumeStaysAttached(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{DetachTimeout: 100 * time.Millisecond}, nil)
	r.volume(t, "stuck")
	r.volume(t, "good")
	r.pod(t, "stuck", mounts("stuck"), r.important(t, 1000))
	r.pod(t, "good", mounts("good"))
	r.drainer.Start(r.request())
	r.until(t, "the second pod has ended, too", func(State) bool { all, _ := r.pods(t); return len(all) == 0 })
	r.detach(t, "good")
	s := r.done(t)
	if s.Err == nil || !strings.Contains(s.Err.Error(), r.volumeName("stuck")) || strings.Contains(s.Err.Error(), r.volumeName("good")+" ") {
		t.Errorf("the drain ended with %v", s.Err)
	}
}

// A manager that starts in the middle finds the volumes of pods that are gone. Those of pods
// that stay are no reason to wait.
func TestVolumesOfPodsThatAreGone(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{DetachTimeout: time.Hour}, nil)
	r.volume(t, "left")
	r.volume(t, "agent")
	r.pod(t, "agent", r.daemonSet(t), mounts("agent"))
	r.drainer.Start(r.request())
	r.saying(t, "1 volumes are still attached to the node: "+r.volumeName("left"))
	r.detach(t, "left")
	if s := r.done(t); s.Err != nil {
		t.Error(s.Err)
	}
}

// A volume of two pods is free only when both have ended, so neither waits for it.
func TestSharedVolume(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{DetachTimeout: time.Hour}, nil)
	r.volume(t, "shared")
	r.pod(t, "one", mounts("shared"))
	r.pod(t, "two", mounts("shared"))
	r.drainer.Start(r.request())
	r.saying(t, "1 volumes are still attached to the node: "+r.volumeName("shared"))
	if all, _ := r.pods(t); len(all) != 0 {
		t.Errorf("pods %q are left", all)
	}
	r.detach(t, "shared")
	if s := r.done(t); s.Err != nil {
		t.Error(s.Err)
	}
}

// denied wraps the requests to a path with an identity that has no rights.
func denied(path string) func(*rest.Config) {
	return func(cfg *rest.Config) {
		cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(req *http.Request) (*http.Response, error) {
				if strings.Contains(req.URL.Path, path) {
					req = req.Clone(req.Context())
					req.Header.Set("Impersonate-User", "nothing-allowed")
				}

				return next.RoundTrip(req)
			})
		})
	}
}

// A forced drain detaches volumes itself. With the roles of an older version none are seen.
func TestVolumesAreNotWaitedFor(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		force bool
		wrap  func(*rest.Config)
	}{
		"forced": {true, nil}, "no right to see attachments": {false, denied("/volumeattachments")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, Settings{DetachTimeout: time.Hour}, tc.wrap)
			r.volume(t, "data")
			r.pod(t, "db", mounts("data"))
			req := r.request()
			req.Force = tc.force
			r.succeed(t, req)
		})
	}
}

// Without the right to read claims no pod waits for another, and the end of the drain still
// waits for all volumes.
func TestClaimsCannotBeRead(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{DetachTimeout: time.Hour}, denied("/persistentvolumeclaims"))
	for _, name := range []string{"one", "two"} {
		r.volume(t, name)
		r.pod(t, name, mounts(name))
	}
	r.drainer.Start(r.request())
	r.saying(t, "2 volumes are still attached to the node")
	r.detach(t, "one")
	r.detach(t, "two")
	if s := r.done(t); s.Err != nil {
		t.Error(s.Err)
	}
}

// A Node that stays keeps what is attached to it.
func TestVolumesOfANodeThatStays(t *testing.T) {
	t.Parallel()
	r := newRig(t, Settings{DetachTimeout: time.Hour}, nil)
	r.volume(t, "left")
	req := r.request()
	req.Stays = true
	r.succeed(t, req)
}
