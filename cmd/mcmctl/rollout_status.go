package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"github.com/machinebus/machinebus/cmd/mcmctl/message"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// pollEvery is how often a rollout is looked at.
const pollEvery = 500 * time.Millisecond

func newRolloutStatus(kube *kubernetes) *cobra.Command {
	var watch bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "status deployment",
		Short: "Follow a rollout to its end",
		Long: `Follow a rollout to its end. On a terminal one line tells how far it is, and which
machine holds it up; elsewhere there is a line for each change. The exit status
is 1 when the rollout has exceeded its deadline, or --timeout has passed.`,
		Example: `  mcmctl rollout status pool-a
  mcmctl rollout status pool-a --watch=false   # how it is now
  mcmctl rollout status mcd/pool-a --timeout 15m`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: kube.complete,
	}
	cmd.Flags().BoolVarP(&watch, "watch", "w", true, "follow it to its end; false for a look")
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "time after which to give up; 0 for never")
	mustComplete(cmd, "timeout", cobra.NoFileCompletions)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		d, err := kube.deployments()
		if err != nil {
			return err
		}
		ctx, stop := untilInterrupted(cmd)
		defer stop()
		if timeout > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeoutCause(ctx, timeout, fmt.Errorf("it did not end within %s", timeout))
			defer cancel()
		}

		return d.follow(ctx, args[0], watch, cmd.OutOrStdout())
	}

	return cmd
}

// follow prints how a rollout goes until it has ended, or with watch off once.
func (d *deployments) follow(ctx context.Context, argument string, watch bool, w io.Writer) error {
	line := &progressLine{w: w, terminal: isTerminal(w)}
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		got, err := d.get(ctx, argument)
		if err != nil && ctx.Err() == nil {
			line.end()

			return err
		}
		if err == nil {
			text, done, failed := rolloutState(got)
			if failed != nil {
				line.end()

				return failed
			}
			line.print(text)
			if done || !watch {
				line.end()

				return nil
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			line.end()
			if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
				return fmt.Errorf("rollout of %s: %w", argument, cause)
			}

			return errors.New("interrupted")
		}
	}
}

// rolloutState tells how a rollout goes, whether it has ended, and whether it has
// failed.
func rolloutState(d *v1alpha1.MachineDeployment) (text string, done bool, err error) {
	s, desired := &d.Status, d.Spec.Replicas
	progressing := condition(d, v1alpha1.MachineDeploymentProgressing)
	switch {
	case s.ObservedGeneration < d.Generation:
		return fmt.Sprintf("machine deployment %s: waiting for mcm to see the change", d.Name), false, nil
	case progressing.Reason == v1alpha1.ReasonInvalidSpec:
		return "", false, fmt.Errorf("machine deployment %s is invalid: %s", d.Name, message.Printable(progressing.Message))
	case progressing.Reason == v1alpha1.ReasonProgressDeadlineExceeded:
		return "", false, fmt.Errorf("machine deployment %s exceeded its progress deadline: %s", d.Name, message.Printable(progressing.Message))
	case s.UpdatedReplicas == desired && s.Replicas == desired && s.AvailableReplicas == desired:
		return fmt.Sprintf("machine deployment %s successfully rolled out", d.Name), true, nil
	}
	text = fmt.Sprintf("machine deployment %s: %d of %d updated, %d available, %d old",
		d.Name, s.UpdatedReplicas, desired, s.AvailableReplicas, max(0, s.Replicas-s.UpdatedReplicas))
	messages := []string{progressing.Message}
	for _, kind := range []v1alpha1.MachineDeploymentConditionType{
		v1alpha1.MachineDeploymentReplicaFailure, v1alpha1.MachineDeploymentFrozen,
	} {
		if c := condition(d, kind); c.Status == corev1.ConditionTrue {
			messages = append(messages, c.Message)
		}
	}
	for _, m := range messages {
		if m != "" {
			text += " - " + message.Printable(m)
		}
	}

	return text, false, nil
}

// condition returns a deployment's condition of a type, or one that is empty.
func condition(d *v1alpha1.MachineDeployment, kind v1alpha1.MachineDeploymentConditionType) v1alpha1.MachineDeploymentCondition {
	for _, c := range d.Status.Conditions {
		if c.Type == kind {
			return c
		}
	}

	return v1alpha1.MachineDeploymentCondition{}
}

// A progressLine is printed over itself on a terminal, and elsewhere again when
// it changes.
type progressLine struct {
	w        io.Writer
	terminal bool
	last     string
}

func (l *progressLine) print(text string) {
	if text == l.last {
		return
	}
	l.last = text
	if l.terminal {
		const most = 150 // a line that wraps is not erased
		if runes := []rune(text); len(runes) > most {
			text = string(runes[:most]) + "…"
		}
		fmt.Fprint(l.w, "\r\x1b[K"+text)
	} else {
		fmt.Fprintln(l.w, text)
	}
}

// end goes on to the next line, if there is an unfinished one.
func (l *progressLine) end() {
	if l.terminal && l.last != "" {
		fmt.Fprintln(l.w)
	}
}
