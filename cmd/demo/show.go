package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// kubectl runs kubectl against the demo's cluster and shows the command and what
// it prints. The dev cluster brings its own; for another cluster it must be
// installed.
func (s *setup) kubectl(ctx context.Context, args ...string) error {
	program, first := s.site.Program("devcluster"), []string{"kubectl"}
	if s.cluster.Foreign {
		found, err := exec.LookPath("kubectl")
		if err != nil {
			s.tell("(kubectl is not installed: kubectl %s is left out)", strings.Join(args, " "))
			return nil
		}
		program, first = found, nil
	}
	s.plain("\n$ kubectl %s", strings.Join(args, " "))
	all := append(first, "--kubeconfig", s.cluster.Kubeconfig, "--namespace", s.cluster.Namespace)
	return s.command(ctx, s.out, program, append(all, args...)...)
}

// mcmctl does the same with mcmctl.
func (s *setup) mcmctl(ctx context.Context, args ...string) error {
	s.plain("\n$ mcmctl %s", strings.Join(args, " "))
	return s.command(ctx, s.out, s.site.Program("mcmctl"), s.mcmctlArgs(args...)...)
}

func (s *setup) mcmctlArgs(args ...string) []string {
	return append([]string{"--nats-url", s.manager.NATSURL, "--cluster", clusterName}, args...)
}

// command runs a program to its end.
func (s *setup) command(ctx context.Context, out io.Writer, program string, args ...string) error {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME")}
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for us to handle
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w", program, strings.Join(args, " "), err)
	}
	return nil
}
