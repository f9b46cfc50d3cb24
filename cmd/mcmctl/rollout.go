package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

const (
	// completionTimeout is how long a shell waits for names.
	completionTimeout = 2 * time.Second
	// annotationRestartedAt in a template makes it another one.
	annotationRestartedAt = "machinebus.io/restarted-at"
)

func newRollout() *cobra.Command {
	kube := &kubernetes{}
	cmd := &cobra.Command{
		Use:   "rollout",
		Short: "See and steer the rollout of a machine deployment",
		Long: `See and steer the rollout of a machine deployment, as kubectl rollout does for
Deployments of pods. It talks to the control cluster, not to NATS.

A deployment is given as its name, or as mcd/name.`,
		Example: `  mcmctl rollout status pool-a           # follow it to its end
  mcmctl rollout history pool-a          # the revisions there are
  mcmctl rollout undo pool-a             # go back to the one before`,
		Args: knownCommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	kube.addFlags(cmd, cmd.PersistentFlags())
	cmd.AddCommand(
		newRolloutStatus(kube), newRolloutHistory(kube), newRolloutUndo(kube),
		newRolloutChange(kube, "pause", "Hold back changes of the template", "paused", pause),
		newRolloutChange(kube, "resume", "Let a paused deployment go on", "resumed", resume),
		newRolloutChange(kube, "restart", "Replace all machines, as the strategy says", "restarted", restart),
	)

	return cmd
}

// newRolloutChange is a command that changes a deployment and says so.
func newRolloutChange(
	kube *kubernetes, verb, short, done string, change func(*v1alpha1.MachineDeployment) error,
) *cobra.Command {
	return &cobra.Command{
		Use:               verb + " deployment",
		Short:             short,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: kube.complete,
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := kube.deployments()
			if err != nil {
				return err
			}
			if err := d.change(cmd.Context(), args[0], change); err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "machine deployment %s %s\n", args[0], done)

			return nil
		},
	}
}

func pause(d *v1alpha1.MachineDeployment) error {
	if d.Spec.Paused {
		return fmt.Errorf("machine deployment %s is already paused", d.Name)
	}
	d.Spec.Paused = true

	return nil
}

func resume(d *v1alpha1.MachineDeployment) error {
	if !d.Spec.Paused {
		return fmt.Errorf("machine deployment %s is not paused", d.Name)
	}
	d.Spec.Paused = false

	return nil
}

func restart(d *v1alpha1.MachineDeployment) error {
	if d.Spec.Paused {
		return fmt.Errorf("machine deployment %s is paused, nothing would happen: resume it first", d.Name)
	}
	metav1.SetMetaDataAnnotation(&d.Spec.Template.ObjectMeta, annotationRestartedAt, time.Now().UTC().Format(time.RFC3339Nano))

	return nil
}

func newRolloutUndo(kube *kubernetes) *cobra.Command {
	var revision int64
	cmd := &cobra.Command{
		Use:   "undo deployment",
		Short: "Go back to an earlier template",
		Long: `Go back to an earlier template. Its machine set is used again if it is still
there; mcmctl rollout history shows which are.`,
		Example: `  mcmctl rollout undo pool-a
  mcmctl rollout undo pool-a --to-revision 3`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: kube.complete,
	}
	cmd.Flags().Int64Var(&revision, "to-revision", 0, "revision to go back to; 0 for the one before")
	mustComplete(cmd, "to-revision", cobra.NoFileCompletions)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		d, err := kube.deployments()
		if err != nil {
			return err
		}
		err = d.undo(cmd.Context(), args[0], revision)
		switch {
		case errors.Is(err, errCurrent):
			fmt.Fprintf(cmd.OutOrStdout(), "machine deployment %s is already at revision %d\n", args[0], revision)

			return nil
		case err != nil:
			return err
		}
		fmt.Fprintf(cmd.OutOrStdout(), "machine deployment %s is rolled back\n", args[0])

		return nil
	}

	return cmd
}

// errCurrent says that a deployment has the template already that it is to go back
// to.
var errCurrent = errors.New("it is the current template")

// undo asks for an earlier template, after a look whether there is one, which may be
// the current: the controller could only tell by an Event.
func (d *deployments) undo(ctx context.Context, argument string, revision int64) error {
	if revision < 0 {
		return fmt.Errorf("--to-revision %d: want a number from mcmctl rollout history, or 0", revision)
	}

	return d.change(ctx, argument, func(got *v1alpha1.MachineDeployment) error {
		if got.Spec.Paused {
			return fmt.Errorf("machine deployment %s is paused: resume it first (mcmctl rollout resume %s)", got.Name, got.Name)
		}
		revisions, err := d.revisions(ctx, got)
		if err != nil {
			return err
		}
		if revision == 0 && len(revisions) < 2 {
			return fmt.Errorf("machine deployment %s has no revision to go back to", got.Name)
		}
		at := slices.IndexFunc(revisions, func(r revisionRow) bool { return r.Revision == revision })
		switch {
		case revision == 0:
		case at < 0:
			return fmt.Errorf("machine deployment %s has no revision %d; mcmctl rollout history %s lists those it has", got.Name, revision, got.Name)
		case equality.Semantic.DeepEqual(revisions[at].template, got.Spec.Template):
			return errCurrent
		}
		got.Spec.RollbackTo = &v1alpha1.RollbackConfig{Revision: revision}

		return nil
	})
}
