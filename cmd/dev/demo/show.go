package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// kubectl runs kubectl against the demo's cluster, and prints the command and its output.
func (s *setup) kubectl(ctx context.Context, args ...string) error {
	s.plainf("\n$ kubectl %s", strings.Join(args, " "))
	program, all := s.findKubectl()
	if program == "" {
		s.plainf("(kubectl is not installed)")
		return nil
	}
	all = append(all, "--kubeconfig", s.cluster.Kubeconfig, "--namespace", s.cluster.Namespace)
	return s.command(ctx, s.out, program, append(all, args...)...)
}

// findKubectl prefers the kubectl of the dev cluster, which need not be built if an
// existing cluster is used.
func (s *setup) findKubectl() (program string, first []string) {
	if len(stack.Missing(s.paths.bin, "devcluster")) == 0 {
		return s.site.Program("devcluster"), []string{"kubectl"}
	}
	program, err := exec.LookPath("kubectl")
	if err != nil {
		return "", nil
	}
	return program, nil
}

// mcmctl runs mcmctl, and prints the command and its output.
func (s *setup) mcmctl(ctx context.Context, args ...string) error {
	s.plainf("\n$ mcmctl %s", strings.Join(args, " "))
	return s.command(ctx, s.out, s.site.Program("mcmctl"), s.mcmctlArgs(args...)...)
}

func (s *setup) mcmctlArgs(args ...string) []string {
	return append([]string{"--nats-url", s.manager.NATSURL, "--cluster", clusterName}, args...)
}

// command runs a program to its end.
func (s *setup) command(ctx context.Context, out io.Writer, program string, args ...string) error {
	cmd := exec.CommandContext(ctx, program, args...)
	// Without KUBECACHEDIR kubectl would write its cache to the user's home.
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"),
		"KUBECACHEDIR=" + filepath.Join(s.paths.run, "kubectl-cache"),
	}
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the demo handles Ctrl-C
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w", program, strings.Join(args, " "), err)
	}
	return nil
}
