package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/internal/stack"
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

// judge waits until all is as it should be, first as the last change wants it, which a
// change of size might hide, then with some machines in each pool and at last without,
// and counts what is not.
func (w *world) judge(ctx context.Context) error {
	if w.damage && w.broken(ctx) == nil {
		return w.readLog(ctx) // it may well never settle, and need not
	}
	if err := w.settle(ctx, "all is as the last change wants it"); err != nil {
		return err
	}
	for _, identity := range identities {
		err := w.patiently(ctx, "the pool has its last size", func(ctx context.Context) error {
			return w.setPool(ctx, identity, func(d *v1alpha1.MachineDeployment) { d.Spec.Replicas = finalReplicas })
		})
		if err != nil {
			return err
		}
	}
	if err := w.settle(ctx, "all is as it should be in the end"); err != nil {
		return err
	}
	for _, identity := range identities {
		d := &v1alpha1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Name: objectName(identity), Namespace: w.name}}
		if err := w.kube.Delete(ctx, d); err != nil {
			return err
		}
	}
	if err := w.patiently(ctx, "nothing is left", w.gone); err != nil {
		w.tally.find(foundf(stuck, 1, "%v", err))
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
	return w.remains(ctx)
}

// settle waits until there is no flaw. What is waited for in vain counts, and so does
// each flaw that is still there.
func (w *world) settle(ctx context.Context, what string) error {
	err := w.patiently(ctx, what, func(ctx context.Context) error {
		s, err := w.look(ctx)
		if err != nil {
			return err
		}
		if found := s.flaws(); len(found) > 0 {
			return fmt.Errorf("%s: %s", found[0].damage, found[0].text)
		}
		return nil
	})
	if err == nil || ctx.Err() != nil {
		return context.Cause(ctx)
	}
	w.tally.find(foundf(stuck, 1, "%v", err))
	s, err := w.look(ctx)
	if err != nil {
		return err
	}
	w.tally.find(s.flaws()...)
	return nil
}

func (w *world) patiently(ctx context.Context, what string, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, healLimit, fmt.Errorf("not within %s", healLimit))
	defer cancel()
	return stack.Poll(ctx, what, check)
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
func (w *world) remains(ctx context.Context) error {
	s, err := w.look(ctx)
	if err != nil {
		return err
	}
	for uid, m := range s.machines {
		w.tally.find(foundf(stuck, 1, "machine %s (%s) does not go: %s", m.Name, uid, m.Status.LastOperation.Description))
	}
	w.tally.find(s.orphans()...)
	tokens, err := w.tokens(ctx)
	if err != nil {
		return err
	}
	claims, err := w.claims(ctx)
	if err != nil {
		return err
	}
	if left := tokens + len(claims); left > 0 {
		w.tally.find(foundf(leaked, left, "%d bootstrap tokens; claims: %s", tokens, strings.Join(claims, "; ")))
	}
	return w.readLog(ctx)
}

// readLog counts what the cloud's log tells.
func (w *world) readLog(ctx context.Context) error {
	entries, err := w.cloud.Admin.Log(ctx, 0)
	if err != nil {
		return err
	}
	found, lifecycles, unseen := readLog(entries, w.witness)
	w.tally.find(found...)
	w.tally.lifecycles, w.tally.unseen = lifecycles, unseen
	return nil
}
