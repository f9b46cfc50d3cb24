package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

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

// follow prints how a rollout goes until it has ended, or with watch off once. A
// cluster that cannot be reached for a while does not end a rollout; one that never
// could be is an error.
func (d *deployments) follow(ctx context.Context, argument string, watch bool, w io.Writer) error {
	line := newProgressLine(w)
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for seen := false; ; {
		got, err := d.get(ctx, argument)
		switch {
		case err == nil:
			seen = true
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
		case ctx.Err() != nil:
		case !seen || lasts(err):
			line.end()

			return err
		default:
			line.print(message.Printable(err.Error()) + "; trying again")
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

// lasts tells of an answer that will be the same the next time.
func lasts(err error) bool {
	return apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)
}

// rolloutState tells how a rollout goes, whether it has ended, and whether it has
// failed.
func rolloutState(d *v1alpha1.MachineDeployment) (text string, done bool, err error) {
	s, desired := &d.Status, d.Spec.Replicas
	progressing, failure := condition(d, v1alpha1.MachineDeploymentProgressing), condition(d, v1alpha1.MachineDeploymentReplicaFailure)
	switch {
	case s.ObservedGeneration < d.Generation:
		return fmt.Sprintf("machine deployment %s: waiting for mcm to see the change%s", d.Name, obstacle(progressing)), false, nil
	case progressing.Reason == v1alpha1.ReasonInvalidSpec:
		return "", false, fmt.Errorf("machine deployment %s is invalid: %s", d.Name, message.Printable(progressing.Message))
	case progressing.Reason == v1alpha1.ReasonProgressDeadlineExceeded:
		return "", false, fmt.Errorf("machine deployment %s exceeded its progress deadline: %s", d.Name, message.Printable(progressing.Message))
	case failure.Status == corev1.ConditionTrue && failure.Reason == v1alpha1.ReasonInvalidSpec:
		return "", false, fmt.Errorf("a machine set of machine deployment %s is invalid: %s", d.Name, message.Printable(failure.Message))
	case s.UpdatedReplicas == desired && s.Replicas == desired && s.AvailableReplicas == desired:
		return fmt.Sprintf("machine deployment %s successfully rolled out", d.Name), true, nil
	}
	text = fmt.Sprintf("machine deployment %s: %d of %d updated, %d available, %d old",
		d.Name, s.UpdatedReplicas, desired, s.AvailableReplicas, max(0, s.Replicas-s.UpdatedReplicas))
	messages := []string{progressing.Message}
	for _, c := range []v1alpha1.MachineDeploymentCondition{failure, condition(d, v1alpha1.MachineDeploymentFrozen)} {
		if c.Status == corev1.ConditionTrue {
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

// obstacle is what keeps mcm from a change, to be added to a text; empty if nothing
// does. All else that the condition says is about what was before.
func obstacle(progressing v1alpha1.MachineDeploymentCondition) string {
	_, why, met := strings.Cut(progressing.Message, v1alpha1.MessageLastError)
	switch {
	case progressing.Reason == v1alpha1.ReasonMachineSetCreateError:
		return " - " + message.Printable(progressing.Message)
	case met:
		return " - " + message.Printable(why)
	default:
		return ""
	}
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
	w    io.Writer
	last string
	// width returns the terminal's width in columns, 0 for unknown; nil when there
	// is no terminal. It may change.
	width func() int
}

func newProgressLine(w io.Writer) *progressLine {
	l := &progressLine{w: w}
	if f, ok := w.(*os.File); ok && isTerminal(w) {
		l.width = func() int {
			width, _, err := term.GetSize(int(f.Fd()))
			if err != nil {
				return 0
			}

			return width
		}
	}

	return l
}

func (l *progressLine) print(text string) {
	if text == l.last {
		return
	}
	l.last = text
	if l.width == nil {
		fmt.Fprintln(l.w, text)

		return
	}
	fmt.Fprint(l.w, "\r\x1b[K"+cut(text, l.width()))
}

// cut shortens a text so that a terminal does not wrap it: the part of a line above
// would not be erased. The last column stays free, where some wrap already.
func cut(text string, width int) string {
	if width <= 0 {
		width = 80
	}
	runes := []rune(text)
	if len(runes) < width {
		return text
	}

	return string(runes[:max(0, width-2)]) + "…"
}

// end goes on to the next line, if there is an unfinished one.
func (l *progressLine) end() {
	if l.width != nil && l.last != "" {
		fmt.Fprintln(l.w)
	}
}
