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

// pollEvery is how often the deployment is read.
const pollEvery = 500 * time.Millisecond

func newRolloutStatus(kube *kubernetes) *cobra.Command {
	var watch bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "status deployment",
		Short: "Follow a rollout to its end",
		Long: `Follow a rollout to its end. On a terminal one line shows its progress and which
machine holds it up; elsewhere each change is printed on a line. The exit status is 1
if the rollout exceeds its deadline or does not end within --timeout.`,
		Example: `  mcmctl rollout status pool-a
  mcmctl rollout status pool-a --watch=false   # print its state once
  mcmctl rollout status mcd/pool-a --timeout 15m`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: kube.complete,
	}
	cmd.Flags().BoolVarP(&watch, "watch", "w", true, "follow it to its end; false to print its state once")
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "give up after this time; 0 for never")
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

// follow prints a rollout's progress until it has ended, or once if watch is false.
// It retries if the API server fails later, but not the first time.
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
		case !seen || permanent(err):
			line.end()

			return err
		default:
			line.print(message.Printable(err.Error()) + "; retrying")
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

// permanent reports whether retrying would return the same error.
func permanent(err error) bool {
	return apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)
}

// rolloutState describes a rollout, and reports whether it has ended or failed.
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

// obstacle returns the error that keeps mcm from a change, as a suffix for a text; "" if
// there is none. Anything else in the condition is about the previous change.
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

// condition returns a deployment's condition of a type, or an empty one.
func condition(d *v1alpha1.MachineDeployment, kind v1alpha1.MachineDeploymentConditionType) v1alpha1.MachineDeploymentCondition {
	for _, c := range d.Status.Conditions {
		if c.Type == kind {
			return c
		}
	}

	return v1alpha1.MachineDeploymentCondition{}
}

// A progressLine overwrites itself on a terminal. Elsewhere each change is a line.
type progressLine struct {
	w    io.Writer
	last string
	// width returns the terminal's current width in columns, 0 if unknown. It is nil
	// without a terminal.
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

// cut shortens a text so that a terminal does not wrap it: erasing a line leaves its
// wrapped part. Some terminals wrap at the last column already.
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

// end finishes the line, if there is one.
func (l *progressLine) end() {
	if l.width != nil && l.last != "" {
		fmt.Fprintln(l.w)
	}
}
