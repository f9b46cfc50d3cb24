// Command faults breaks machinebus on purpose, for as long as it takes to bring a
// number of machines through their lives, and then counts what went wrong. It runs
// the built programs, has MachineDeployments scale, roll and shrink, and meanwhile
// kills, freezes, cuts off and slows down whatever there is, in an order that
// follows from a seed. The judge is the append-only log of the cloud.
//
// `make faults` builds what it needs first. Timing is the machine's own, so two runs
// of a seed make the same faults in the same order, and neither hit the same nor are
// the same run.
//
// It exits with 1 when machines were lost, doubled, leaked or stuck or a program has
// crashed, and with 2 when the run itself went wrong: then nothing is known about
// machines. With --until-damage it goes on until machines were doubled or leaked, which
// is for programs that are broken on purpose: 2 means that it has not come to that.
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

	"github.com/machinebus/machinebus/cmd/internal/stack"
)

// The kinds of bus that a run can be on.
const (
	busCluster  = "cluster"  // three nats-servers, two managers
	busEmbedded = "embedded" // one manager with NATS inside
)

// options are the flags.
type options struct {
	seed       uint64
	lifecycles int
	each       int
	buses      []string
	kinds      []string // that are wanted, where they can happen
	chosen     bool     // they were named, so each must happen somewhere
	damage     bool     // is to be found
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

// status is what to exit with.
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
	fs.Uint64Var(&o.seed, "seed", 1, "`number` from which the order of the faults follows")
	fs.IntVar(&o.lifecycles, "lifecycles", 200, "`number` of machines that are to come and go")
	fs.IntVar(&o.each, "each", 1, "how `often` each kind of fault is to hit something on each bus, at least")
	buses := fs.String("bus", busCluster+","+busEmbedded, "what to run on, one after the other: cluster, embedded or both")
	only := fs.String("kinds", "", "`kinds` of faults, with commas; none means all of: "+strings.Join(kindNames(), ", "))
	fs.DurationVar(&o.longest, "longest", time.Minute, "how long a process is frozen, or a link cut, at most")
	fs.DurationVar(&o.limit, "limit", 0, "how long to go on with faults on each bus; 0 means a minute and 10s for each lifecycle")
	fs.BoolVar(&o.damage, "until-damage", false, "go on until machines were doubled or leaked; without, the run has proved nothing")
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
			return nil, fmt.Errorf("--bus: %q is neither cluster nor embedded", b)
		}
	}
	o.kinds = kindNames()
	if *only != "" {
		o.kinds, o.chosen = strings.Split(*only, ","), true
	}
	for _, name := range o.kinds {
		if !slices.Contains(kindNames(), name) {
			return nil, fmt.Errorf("--kinds: there is no %q; there are: %s", name, strings.Join(kindNames(), ", "))
		}
	}
	if o.limit == 0 {
		o.limit = time.Minute + time.Duration(o.lifecycles)*10*time.Second
	}
	o.crds = filepath.Join(*repository, "deploy", "crds")
	o.examples = filepath.Join(*repository, "deploy", "examples")
	return o, nil
}

// run starts what all worlds share, and runs them.
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

// runBuses runs one world after the other, and tells what they came to. An error ends
// that, and does not hide what was found before.
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
	if o.chosen && err == nil { // otherwise it may be for a bus that it has not come to
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

// startLimit bounds what has to be there before the first fault.
const startLimit = 2 * time.Minute
