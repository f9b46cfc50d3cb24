package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus/chaos"
	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/bootstrap"
)

const (
	// healLimit is how long everything may take to recover after the last fault: several
	// operation timeouts.
	healLimit = 2 * time.Minute
	// finalReplicas is how many machines each pool has after the faults.
	finalReplicas = 2
)

// heal mends all links.
func (w *world) heal() {
	for _, t := range w.all {
		t.each((*chaos.Link).Mend)
	}
}

// judge waits until everything is as desired: first after the last change, whose flaws a
// change of size might hide, then with some machines in each pool, and finally with none.
// It counts what is not.
func (w *world) judge(ctx context.Context) error {
	if w.damage && w.broken(ctx) == nil {
		return w.readLog(ctx) // it need not settle, and may never do so
	}
	if err := w.settle(ctx, "everything is as the last change wants it", w.flaws); err != nil {
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
	if err := w.settle(ctx, "everything is as desired in the end", w.flaws); err != nil {
		return err
	}
	for _, identity := range identities {
		d := &v1alpha1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Name: objectName(identity), Namespace: w.name}}
		err := w.patiently(ctx, "the pool is deleted", func(ctx context.Context) error {
			return client.IgnoreNotFound(w.kube.Delete(ctx, d))
		})
		if err != nil {
			return err
		}
	}
	if err := w.patiently(ctx, "the Machines without a pool are deleted", w.endReused); err != nil {
		return err
	}
	// mcm releases a Node without a Machine once no Machine can claim it any more.
	w.patience += creationTimeout
	if err := w.settle(ctx, "nothing is left", w.remains); err != nil {
		return err
	}
	err := w.patiently(ctx, "the witness has seen all changes of Machines", func(ctx context.Context) error {
		s, err := w.look(ctx)
		if err != nil {
			return err
		}
		return w.witness.caughtUp(s.machines)
	})
	if err != nil {
		return err
	}
	return w.readLog(ctx)
}

// settle waits until wrong finds nothing, and counts what it still finds at the end.
func (w *world) settle(ctx context.Context, what string, wrong func(context.Context) ([]finding, error)) error {
	err := w.patiently(ctx, what, func(ctx context.Context) error {
		found, err := wrong(ctx)
		if err == nil && len(found) > 0 {
			err = fmt.Errorf("%s: %s", found[0].damage, found[0].text)
		}
		return err
	})
	if err == nil || ctx.Err() != nil {
		return context.Cause(ctx)
	}
	found, failed := wrong(ctx)
	w.tally.find(found...)
	if failed != nil {
		return errors.Join(err, failed)
	}
	if len(found) == 0 { // only the wait itself can be reported
		w.tally.find(foundf(stuck, "wait until "+what, 1, "%v", err))
	}
	return nil
}

func (w *world) patiently(ctx context.Context, what string, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, w.patience, fmt.Errorf("not within %s", w.patience))
	defer cancel()
	return stack.Poll(ctx, what, check)
}

// flaws returns what is not as the pools desire.
func (w *world) flaws(ctx context.Context) ([]finding, error) {
	s, err := w.look(ctx)
	if err != nil {
		return nil, err
	}
	return s.flaws(), nil
}

// remains returns what is left of pools that are gone. With an error it returns what it
// has found so far.
func (w *world) remains(ctx context.Context) ([]finding, error) {
	s, err := w.look(ctx)
	if err != nil {
		return nil, err
	}
	found := s.remains()
	var tokens corev1.SecretList
	err = w.kube.List(ctx, &tokens, client.InNamespace(metav1.NamespaceSystem), client.HasLabels{bootstrap.LabelKeyMachineUID})
	if err != nil {
		return found, err
	}
	for i := range tokens.Items {
		uid := tokens.Items[i].Labels[bootstrap.LabelKeyMachineUID]
		found = append(found, foundf(leaked, uid, 1, "the bootstrap token of machine %s is left", uid))
	}
	claims, err := stack.HeldClaims(ctx, w.busURL, w.name, identities...)
	if err != nil {
		return found, err
	}
	for _, c := range claims {
		uid, _, _ := strings.Cut(c.GetOperationId(), ".")
		if of, _ := w.witness.lived(uid); of.forced {
			continue // its Machine was removed by force: the claim expires with the stream's age limit
		}
		found = append(found, foundf(leaked, uid, 1, "the claim to machine %s for %s, %s by %s, is left",
			c.GetName(), c.GetOperationId(), c.GetState(), c.GetReplica()))
	}
	return found, nil
}

// salvage counts, for a run that has failed itself, what the cloud's log proves anyway:
// instances that must not have been created. Other findings may only be unfinished.
func (w *world) salvage(ctx context.Context) error {
	if w.cloud == nil || w.cloud.Admin == nil {
		return nil // there is no log yet
	}
	const patience = 10 * time.Second
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	entries, err := w.cloud.Admin.Log(ctx, 0)
	if err != nil {
		return fmt.Errorf("read the cloud's log of the failed run: %w", err)
	}
	found, sums := readLog(entries, w.witness)
	w.tally.figures = sums
	w.tally.find(slices.DeleteFunc(found, func(f finding) bool { return !f.broken() })...)
	return nil
}

// readLog counts the findings in the cloud's log.
func (w *world) readLog(ctx context.Context) error {
	entries, err := w.cloud.Admin.Log(ctx, 0)
	if err != nil {
		return err
	}
	found, sums := readLog(entries, w.witness)
	w.tally.find(found...)
	w.tally.figures = sums
	return nil
}
