// Command faults breaks machinebus on purpose until a number of machines have come and
// gone, and then counts what went wrong. It runs the built programs, scales and rolls
// MachineDeployments, and meanwhile kills, freezes, disconnects and slows down processes
// in an order derived from a seed. It judges by the append-only log of the cloud.
//
// `make faults` builds the programs first. Two runs with one seed make the same faults in
// the same order, but as their timing differs, the faults do not have the same effects.
//
// The exit code is 1 if machines were lost, doubled, leaked or stuck, or if a program
// crashed, and 2 if the run itself failed, so that nothing is known about machines. With
// --until-damage it runs until machines were doubled or leaked, to test programs that are
// broken on purpose: 2 then means that this did not happen.
package main

import (
	"context"
	"errors"
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

	"github.com/machinebus/machinebus/cmd/dev/stack"
)

// The kinds of bus that a run can be on.
const (
	busCluster  = "cluster"  // three nats-servers, two managers
	busEmbedded = "embedded" // one manager with an embedded NATS
)

// options holds the flags.
type options struct {
	seed       uint64
	lifecycles int
	each       int
	buses      []string
	kinds      []string // wanted, as far as they can happen
	chosen     bool     // they were given, so each must happen somewhere
	damage     bool     // run until damage is found
	longest    time.Duration
	limit      time.Duration
	bin, dir   string
	crds       string
	examples   string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "faults:", err)
		os.Exit(status(err))
	}
}

// status returns the exit code.
func status(err error) int {
	const damaged, unknown = 1, 2
	if errors.Is(err, errDamaged) {
		return damaged
	}
	return unknown
}

func parse(args []string) (*options, error) {
	o := &options{}
	fs := flag.NewFlagSet("faults", flag.ContinueOnError)
	fs.Uint64Var(&o.seed, "seed", 1, "`number` from which the order of the faults is derived")
	fs.IntVar(&o.lifecycles, "lifecycles", 200, "`number` of machines that must come and go")
	fs.IntVar(&o.each, "each", 1, "how `often` each kind of fault must at least have an effect on each bus")
	buses := fs.String("bus", busCluster+","+busEmbedded, "buses to run on, one after the other: cluster, embedded or both")
	only := fs.String("kinds", "", "`kinds` of faults, separated by commas; default all of: "+strings.Join(kindNames(), ", "))
	fs.DurationVar(&o.longest, "longest", time.Minute, "longest time to freeze a process or cut a link")
	fs.DurationVar(&o.limit, "limit", 0, "how long to make faults on each bus; 0 means a minute and 10s for each lifecycle")
	fs.BoolVar(&o.damage, "until-damage", false, "run until machines were doubled or leaked, and fail if none were")
	repository := fs.String("repository", ".", "`folder` of the repository, for CRDs and examples")
	fs.StringVar(&o.bin, "bin", ".out/bin", "`folder` of the built programs")
	fs.StringVar(&o.dir, "dir", ".out/run/faults", "`folder` for logs and data; it is emptied first")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if fs.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	if o.lifecycles < 1 || o.each < 1 || o.longest < time.Second {
		return nil, fmt.Errorf("--lifecycles=%d, --each=%d and --longest=%s: want at least 1, 1 and 1s", o.lifecycles, o.each, o.longest)
	}
	o.buses = strings.Split(*buses, ",")
	for _, b := range o.buses {
		if b != busCluster && b != busEmbedded {
			return nil, fmt.Errorf("--bus: %q: want cluster, embedded or both with a comma", b)
		}
	}
	o.kinds = kindNames()
	if *only != "" {
		o.kinds, o.chosen = strings.Split(*only, ","), true
	}
	for _, name := range o.kinds {
		if !slices.Contains(kindNames(), name) {
			return nil, fmt.Errorf("--kinds: unknown kind %q; want some of: %s", name, strings.Join(kindNames(), ", "))
		}
	}
	if o.limit == 0 {
		o.limit = time.Minute + time.Duration(o.lifecycles)*10*time.Second
	}
	o.crds = filepath.Join(*repository, "deploy", "crds")
	o.examples = filepath.Join(*repository, "deploy", "examples")
	return o, nil
}

// run starts the cluster that all worlds share, and runs them.
func run(ctx context.Context, args []string, out io.Writer) (err error) {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if missing := stack.Missing(o.bin, "devcluster", "mcm", "virtual-cloud", "driver-virtual", "nats-server"); len(missing) > 0 {
		return fmt.Errorf("not built: %s in %s; run: make build devcluster", strings.Join(missing, ", "), o.bin)
	}
	dir, err := filepath.Abs(o.dir)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return err
	}
	release, err := stack.Lock(dir + ".lock")
	if err != nil {
		return fmt.Errorf("another run uses %s: %w", dir, err)
	}
	defer release()
	site, err := stack.NewSite(stack.SiteOptions{Bin: o.bin, Dir: dir})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.Close()) }()
	fmt.Fprintf(out, "seed %d, %d lifecycles, logs in %s\n", o.seed, o.lifecycles, dir)
	cluster, err := startCluster(ctx, site, o.crds)
	if err != nil {
		return err
	}
	return runBuses(o, out, func(t *tally) error { return runWorld(ctx, o, out, cluster, t) })
}

// runBuses runs one world after the other, and prints the results. After an error it runs
// no more worlds, but prints what was found.
func runBuses(o *options, out io.Writer, runWorld func(*tally) error) (err error) {
	var tallies []*tally
	for i, kind := range o.buses {
		share := o.lifecycles / len(o.buses)
		if i == 0 {
			share += o.lifecycles % len(o.buses)
		}
		t := newTally(kind, share, o.each)
		tallies = append(tallies, t)
		if err = runWorld(t); err != nil {
			err = fmt.Errorf("on the bus %s: %w", kind, err)
			break
		}
	}
	var wanted []string
	if o.chosen && err == nil { // otherwise the kind may be for a bus that was not run
		wanted = o.kinds
	}
	err = errors.Join(err, verdict(out, wanted, tallies))
	if o.damage {
		return sought(out, tallies, err)
	}
	return err
}

// startCluster starts the API server with our CRDs.
func startCluster(ctx context.Context, site *stack.Site, crds string) (*stack.DevCluster, error) {
	cluster, err := site.StartDevClusterWithHistory(ctx)
	if err != nil {
		return nil, err
	}
	kube, err := stack.NewClient(cluster.Kubeconfig)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	_, err = stack.ApplyCRDs(ctx, kube, crds)
	return cluster, err
}

// startLimit bounds the set-up before the first fault.
const startLimit = 2 * time.Minute
