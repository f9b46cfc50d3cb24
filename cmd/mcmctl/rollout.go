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
	// annotationRestartedAt changes a template, so that all machines are replaced.
	annotationRestartedAt = "machinebus.io/restarted-at"
)

func newRollout() *cobra.Command {
	kube := &kubernetes{}
	cmd := &cobra.Command{
		Use:   "rollout",
		Short: "Manage the rollout of a machine deployment",
		Long: `Manage the rollout of a machine deployment, as kubectl rollout does for Deployments
of pods. It talks to the control cluster, not to NATS.

A deployment is given as its name, or as mcd/name.`,
		Example: `  mcmctl rollout status pool-a           # follow it to its end
  mcmctl rollout history pool-a          # list its revisions
  mcmctl rollout undo pool-a             # go back to the previous one`,
		Args: knownCommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	kube.addFlags(cmd, cmd.PersistentFlags())
	cmd.AddCommand(
		newRolloutStatus(kube), newRolloutHistory(kube), newRolloutUndo(kube),
		newRolloutChange(kube, "pause", "Stop rolling out changes of the template", "paused", pause),
		newRolloutChange(kube, "resume", "Resume a paused rollout", "resumed", resume),
		newRolloutChange(kube, "restart", "Replace all machines according to the strategy", "restarted", restart),
	)

	return cmd
}

// newRolloutChange returns a command that changes a deployment.
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
		return fmt.Errorf("machine deployment %s is paused: resume it first (mcmctl rollout resume %s)", d.Name, d.Name)
	}
	metav1.SetMetaDataAnnotation(&d.Spec.Template.ObjectMeta, annotationRestartedAt, time.Now().UTC().Format(time.RFC3339Nano))

	return nil
}

func newRolloutUndo(kube *kubernetes) *cobra.Command {
	var revision int64
	cmd := &cobra.Command{
		Use:   "undo deployment",
		Short: "Go back to an earlier template",
		Long: `Go back to an earlier template, and reuse its machine set. mcmctl rollout history
lists the revisions that still have one.`,
		Example: `  mcmctl rollout undo pool-a
  mcmctl rollout undo pool-a --to-revision 3`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: kube.complete,
	}
	cmd.Flags().Int64Var(&revision, "to-revision", 0, "revision to go back to; 0 for the previous one")
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

// errCurrent means that the deployment already has the template to go back to.
var errCurrent = errors.New("it is the current template")

// undo asks for an earlier template. It checks first that there is one other than the
// current, which the controller could report only by an Event.
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
