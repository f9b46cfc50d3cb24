package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/internal/stack"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/bootstrap"
)

const (
	// healLimit is how long everything may take to be as it should be once nothing
	// is broken any more: several operation timeouts.
	healLimit = 2 * time.Minute
	// finalReplicas is how many machines each pool has at the end of the faults.
	finalReplicas = 2
)

// heal undoes what faults may have left.
func (w *world) heal() {
	for _, t := range w.all {
		t.each((*stack.Link).Mend)
	}
}

// judge waits until all is as it should be, first with machines and then without,
// and counts what is not.
func (w *world) judge(ctx context.Context, out io.Writer) error {
	complain := func(format string, args ...any) { fmt.Fprintf(out, w.kind+": "+format+"\n", args...) }
	for _, identity := range identities {
		err := w.patiently(ctx, "the pool has its last size", func(ctx context.Context) error {
			return w.setPool(ctx, identity, func(d *v1alpha1.MachineDeployment) { d.Spec.Replicas = finalReplicas })
		})
		if err != nil {
			return err
		}
	}
	if err := w.patiently(ctx, "instances equal Machines", w.settled); err != nil {
		complain("%v", err)
	}
	if err := w.compare(ctx, complain); err != nil {
		return err
	}
	for _, identity := range identities {
		d := &v1alpha1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Name: objectName(identity), Namespace: w.name}}
		if err := w.kube.Delete(ctx, d); err != nil {
			return err
		}
	}
	if err := w.patiently(ctx, "nothing is left", w.gone); err != nil {
		complain("%v", err)
	}
	err := w.patiently(ctx, "all that happened to Machines is known", func(ctx context.Context) error {
		s, err := w.look(ctx)
		if err != nil {
			return err
		}
		return w.witness.caughtUp(s.machines)
	})
	if err != nil {
		return err
	}
	return w.remains(ctx, complain)
}

func (w *world) patiently(ctx context.Context, what string, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, healLimit, fmt.Errorf("not within %s", healLimit))
	defer cancel()
	return stack.Poll(ctx, what, check)
}

// state is what Kubernetes and the cloud have, by uid of the Machine.
type state struct {
	machines  map[types.UID]*v1alpha1.Machine
	instances map[types.UID][]cloudapi.Instance
}

func (w *world) look(ctx context.Context) (*state, error) {
	s := &state{machines: map[types.UID]*v1alpha1.Machine{}, instances: map[types.UID][]cloudapi.Instance{}}
	var list v1alpha1.MachineList
	if err := w.kube.List(ctx, &list, client.InNamespace(w.name)); err != nil {
		return nil, err
	}
	for i := range list.Items {
		s.machines[list.Items[i].UID] = &list.Items[i]
	}
	live, err := w.cloud.Instances(ctx)
	for i := range live {
		uid := types.UID(live[i].Tags[cloudapi.TagMachineUID])
		s.instances[uid] = append(s.instances[uid], live[i])
	}
	return s, err
}

// settled returns an error until every pool has its machines, all Running, each
// with one instance, and there is no other instance.
func (w *world) settled(ctx context.Context) error {
	s, err := w.look(ctx)
	if err != nil {
		return err
	}
	if want := finalReplicas * len(identities); len(s.machines) != want {
		return fmt.Errorf("there are %d Machines, want %d", len(s.machines), want)
	}
	for uid, m := range s.machines {
		if m.Status.CurrentStatus.Phase != v1alpha1.MachineRunning || m.DeletionTimestamp != nil || len(s.instances[uid]) != 1 {
			return fmt.Errorf("machine %s of %s is %q with %d instances, last operation: %s",
				m.Name, m.Spec.Class.Name, m.Status.CurrentStatus.Phase, len(s.instances[uid]), m.Status.LastOperation.Description)
		}
	}
	for uid, instances := range s.instances {
		if s.machines[uid] == nil {
			return fmt.Errorf("instance %s (%s) has no Machine", instances[0].ID, instances[0].Name)
		}
	}
	return nil
}

// compare counts what is wrong between Machines and instances.
func (w *world) compare(ctx context.Context, complain func(string, ...any)) error {
	s, err := w.look(ctx)
	if err != nil {
		return err
	}
	for uid, m := range s.machines {
		n := len(s.instances[uid])
		switch {
		case m.Status.CurrentStatus.Phase != v1alpha1.MachineRunning || m.DeletionTimestamp != nil:
			w.tally.stuck++
			complain("stuck: machine %s (%s) is %q: %s", m.Name, uid, m.Status.CurrentStatus.Phase, m.Status.LastOperation.Description)
		case n == 0:
			w.tally.lost++
			complain("lost: machine %s (%s) is Running and has no instance", m.Name, uid)
		case n > 1:
			w.tally.doubled += n - 1
			complain("doubled: machine %s (%s) has %d instances", m.Name, uid, n)
		}
	}
	if short := finalReplicas*len(identities) - len(s.machines); short > 0 {
		w.tally.stuck += short
		complain("stuck: %d Machines are not there", short)
	}
	for uid, instances := range s.instances {
		if s.machines[uid] == nil {
			w.tally.leaked += len(instances)
			complain("leaked: %d instances of machine %s (%s), which is gone", len(instances), instances[0].Name, uid)
		}
	}
	return nil
}

// gone returns an error until nothing of any pool is left.
func (w *world) gone(ctx context.Context) error {
	s, err := w.look(ctx)
	if err != nil {
		return err
	}
	if len(s.machines)+len(s.instances) > 0 {
		return fmt.Errorf("%d Machines and instances of %d are left", len(s.machines), len(s.instances))
	}
	tokens, err := w.tokens(ctx)
	if err == nil && tokens > 0 {
		err = fmt.Errorf("%d bootstrap tokens are left", tokens)
	}
	if err != nil {
		return err
	}
	claims, err := w.claims(ctx)
	if err == nil && len(claims) > 0 {
		err = fmt.Errorf("claims are left: %v", claims)
	}
	return err
}

func (w *world) tokens(ctx context.Context) (int, error) {
	var secrets corev1.SecretList
	err := w.kube.List(ctx, &secrets, client.InNamespace(metav1.NamespaceSystem), client.HasLabels{bootstrap.LabelKeyMachineUID})
	return len(secrets.Items), err
}

func (w *world) claims(ctx context.Context) ([]string, error) {
	return stack.HeldClaims(ctx, w.busURL, w.name, identities...)
}

// remains counts what is left at the very end, and reads the cloud's log.
func (w *world) remains(ctx context.Context, complain func(string, ...any)) error {
	s, err := w.look(ctx)
	if err != nil {
		return err
	}
	for uid, m := range s.machines {
		w.tally.stuck++
		complain("stuck: machine %s (%s) does not go: %s", m.Name, uid, m.Status.LastOperation.Description)
	}
	for uid, instances := range s.instances {
		w.tally.leaked += len(instances)
		complain("leaked: %d instances of machine %s (%s) do not go", len(instances), instances[0].Name, uid)
	}
	tokens, err := w.tokens(ctx)
	if err != nil {
		return err
	}
	claims, err := w.claims(ctx)
	if err != nil {
		return err
	}
	if tokens+len(claims) > 0 {
		w.tally.leaked += tokens + len(claims)
		complain("leaked: %d bootstrap tokens; claims: %s", tokens, strings.Join(claims, "; "))
	}
	return w.readLog(ctx, complain)
}

// readLog counts lifecycles, and instances that were made for a machine that had one
// before. An instance that was deleted although its machine was not to go is lost,
// whatever has replaced it.
func (w *world) readLog(ctx context.Context, complain func(string, ...any)) error {
	entries, err := w.cloud.Admin.Log(ctx, 0)
	if err != nil {
		return err
	}
	for _, d := range doubles(entries) {
		w.tally.doubled++
		complain("doubled: %s", d)
	}
	made, live := map[string]int{}, map[string]int{}
	for _, e := range entries {
		switch {
		case e.Op == cloudapi.OpCreate && e.Event == cloudapi.EventCreated:
			made[e.MachineUID]++
			live[e.MachineUID]++
		case e.Event == cloudapi.EventDeleted:
			live[e.MachineUID]--
			if live[e.MachineUID] == 0 && !w.witness.allows(e.MachineUID, e.Time) {
				w.tally.lost++
				complain("lost: the instance of machine %s (%s) was deleted at %s, before the Machine was to go", e.Name, e.MachineUID, e.Time)
			}
		}
	}
	for uid := range made {
		if live[uid] == 0 {
			w.tally.lifecycles++
		}
	}
	return nil
}
