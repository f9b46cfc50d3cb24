// Command bench measures the speed and resource use of machinebus. Each benchmark compares
// it with a peer or a bound in interleaved rounds on the same machine: ratios are
// comparable between machines, times are not.
//
// `make bench` builds the programs first. It is not a test: it fails only if something does
// not work, not if a target is missed.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// benchmarks are in the order in which they run.
var benchmarks = []struct {
	name, what string
	run        func(context.Context, *bench) error
}{
	{"faults", "creates in flight while a replica is killed or stopped, against an undisturbed run", benchFaults},
	{"create", "machines at a provider that takes its time, against blocking workers", benchCreate},
	{"requests", "requests to the API server for each machine", benchRequests},
	{"autoscaler", "all calls of a loop of the cluster-autoscaler, for 1,000 nodes", benchAutoscaler},
	{"fleet", "mcm with very many machines, and with all their operations in flight", benchFleet},
	{"delete", "deletion of an empty machine, beyond the cloud's own time", benchDelete},
	{"scale", "a pool from nothing to many machines and back, and a rollout", benchScale},
}

// A bench is one invocation.
type bench struct {
	report

	rounds   int
	machines int
	latency  time.Duration
	pool     int // machines of the benchmark scale, and of them
	rolled   int // those that are rolled out
	fleet    int
	bin, dir string
	crds     string
	examples string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := mainOf(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// mainOf runs the benchmarks, or a peer that must be a process of its own.
func mainOf(ctx context.Context, args []string) error {
	if len(args) > 0 && args[0] == bareGatewayCommand {
		return runBareGateway(ctx, args[1:])
	}
	return run(ctx, args, os.Stdout)
}

func run(ctx context.Context, args []string, out io.Writer) error {
	b := &bench{report: report{out: out}}
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	only := fs.String("only", "", "`names` of the benchmarks to run, with commas; none means all of: "+strings.Join(names(), ", "))
	repository := fs.String("repository", ".", "`folder` of the repository, for CRDs and examples")
	fs.IntVar(&b.rounds, "rounds", 5, "`number` of interleaved rounds, of which the median counts; at least 5")
	fs.IntVar(&b.machines, "machines", 200, "`number` of machines of the benchmark create")
	fs.DurationVar(&b.latency, "latency", time.Second, "time that the provider takes for each of them")
	fs.IntVar(&b.pool, "pool", 1000, "`number` of machines of the benchmark scale")
	fs.IntVar(&b.rolled, "rolled", 300, "`number` of them that are left for the rollout of the pool")
	fs.IntVar(&b.fleet, "fleet", 1000, "`number` of machines of the benchmark fleet")
	fs.StringVar(&b.bin, "bin", ".out/bin", "`folder` of the built programs")
	fs.StringVar(&b.dir, "dir", ".out/run/bench", "`folder` for logs and data; it is emptied first")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q: name benchmarks with --only", fs.Arg(0))
	}
	if b.fleet < 1 {
		return fmt.Errorf("--fleet=%d: want at least one machine", b.fleet)
	}
	if b.machines < 1 || b.latency < 0 {
		return fmt.Errorf("--machines=%d and --latency=%s: want at least one machine and no negative time", b.machines, b.latency)
	}
	if b.pool < 1 || b.rolled < 1 {
		return fmt.Errorf("--pool=%d and --rolled=%d: want at least one machine", b.pool, b.rolled)
	}
	const fewest = 5
	if b.rounds < fewest {
		return fmt.Errorf("--rounds=%d: a median needs at least %d", b.rounds, fewest)
	}
	chosen := names()
	if *only != "" {
		chosen = strings.Split(*only, ",")
	}
	for _, name := range chosen {
		if !slices.Contains(names(), name) {
			return fmt.Errorf("--only: unknown benchmark %q; want some of: %s", name, strings.Join(names(), ", "))
		}
	}
	b.crds = filepath.Join(*repository, "deploy", "crds")
	b.examples = filepath.Join(*repository, "deploy", "examples")
	b.machine()
	for _, benchmark := range benchmarks {
		if !slices.Contains(chosen, benchmark.name) {
			continue
		}
		b.title(benchmark.name, benchmark.what)
		if err := benchmark.run(ctx, b); err != nil {
			return fmt.Errorf("%s: %w", benchmark.name, err)
		}
	}
	return nil
}

func names() []string {
	all := make([]string, 0, len(benchmarks))
	for _, b := range benchmarks {
		all = append(all, b.name)
	}
	return all
}
