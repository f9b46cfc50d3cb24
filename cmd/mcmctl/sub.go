package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/cmd/mcmctl/message"
)

func newSub(conn *connection) *cobra.Command {
	f := &follower{}
	cmd := &cobra.Command{
		Use:     "sub [subject]",
		Aliases: []string{"watch"},
		Short:   "Print the messages on the bus as they pass",
		Long: `Print the messages on the bus as they pass, one line each: time, subject and
content. It ends with Ctrl-C, or as set by --count and --for.

The subject is the part after mcm.v1.<cluster>, with NATS wildcards. A subject that
begins with mcm. or $ is used unchanged. Heartbeats of replicas and of mcm are
omitted unless --sessions is set or the subject names them.`,
		Example: `  mcmctl sub
  mcmctl sub 'driver.*.*.default.worker-1' --count 1   # the next request for one machine
  mcmctl sub 'audit.>' -o json | jq .message.audit     # what ended, and how
  mcmctl sub 'session.virtual.*' --for 2s`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: completeTrees,
	}
	cmd.Flags().BoolVar(&f.beats, "sessions", false, "also show heartbeats of replicas (session) and of mcm (hello)")
	cmd.Flags().IntVarP(&f.count, "count", "n", 0, "end after this many messages; fails if --for ends sooner")
	cmd.Flags().DurationVar(&f.limit, "for", 0, "end after this time")
	mustComplete(cmd, "count", cobra.NoFileCompletions)
	mustComplete(cmd, "for", cobra.NoFileCompletions)
	out := addFormat(cmd, formatTable, formatJSON)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if f.count < 0 || f.limit < 0 {
			return errors.New("--count and --for must not be negative")
		}
		f.out, f.json, f.done = cmd.OutOrStdout(), out.value == formatJSON, make(chan struct{})

		return f.run(cmd, conn, args)
	}

	return cmd
}

func completeTrees(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var trees []cobra.Completion
	for _, tree := range []bus.Tree{
		bus.TreeDriver, bus.TreeReplica, bus.TreePlain, bus.TreeReply, bus.TreeSession, bus.TreeClaim, bus.TreeHello, bus.TreeFetch,
		bus.TreeChanged, bus.TreeNodeGroup, bus.TreeAudit, bus.TreeOutcomes,
	} {
		trees = append(trees, string(tree)+".>")
	}

	return trees, cobra.ShellCompDirectiveNoFileComp
}

// follower prints messages until a limit is reached.
type follower struct {
	beats bool
	json  bool
	count int
	limit time.Duration
	out   io.Writer
	done  chan struct{} // closed after the last message

	mu    sync.Mutex
	seen  int
	ended bool
	err   error
}

func (f *follower) run(cmd *cobra.Command, conn *connection, args []string) error {
	c, err := conn.connect(cmd)
	if err != nil {
		return err
	}
	defer c.Close()
	subject := f.subject(conn.cluster, args)
	ctx, stop := untilInterrupted(cmd)
	defer stop()
	if f.limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, f.limit)
		defer cancel()
	}
	unsubscribe, err := bus.Watch(c, subject, f.onMessage)
	if err != nil {
		return err
	}
	defer unsubscribe()
	fmt.Fprintf(cmd.ErrOrStderr(), "listening to %s on %s\n", subject, c.URL())
	select {
	case <-f.done:
	case <-ctx.Done():
	}

	return f.end(subject, errors.Is(ctx.Err(), context.DeadlineExceeded))
}

// subject returns the subject to subscribe to. One that names the heartbeats turns
// them on.
func (f *follower) subject(cluster string, args []string) string {
	const root = "mcm.v1."
	if len(args) == 0 {
		return root + cluster + ".>"
	}
	filter := args[0]
	for _, tree := range []bus.Tree{bus.TreeSession, bus.TreeHello} {
		if strings.Contains("."+filter+".", "."+string(tree)+".") {
			f.beats = true
		}
	}
	if strings.HasPrefix(filter, "mcm.") || strings.HasPrefix(filter, "$") {
		return filter
	}

	return root + cluster + "." + filter
}

// end stops printing and returns the command's error.
func (f *follower) end(subject string, timeout bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = true
	if f.err == nil && timeout && f.seen < f.count {
		return fmt.Errorf("%d of %d messages on %s arrived within %s", f.seen, f.count, subject, f.limit)
	}

	return f.err
}

// onMessage runs on the subscription's goroutine.
func (f *follower) onMessage(subject, reply string, _ map[string][]string, data []byte) {
	m, err := message.Parse(data)
	if err == nil && !f.beats && m.Heartbeat() {
		return
	}
	now := time.Now()
	row := message.NewRow(subject)
	row.Time, row.Reply = now.Format(time.RFC3339Nano), reply
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended {
		return
	}
	f.seen++
	f.err = f.print(now, row, m, err)
	if f.err != nil || f.seen == f.count {
		f.ended = true
		close(f.done)
	}
}

func (f *follower) print(now time.Time, row message.Row, m message.Message, parseErr error) error {
	if f.json {
		text, err := m.JSON()
		if row.Message = text; parseErr != nil || err != nil {
			row.Message, row.Error = nil, errors.Join(parseErr, err).Error()
		}

		return message.WriteJSON(f.out, row, true)
	}
	text := m.Summary()
	if parseErr != nil {
		text = message.Printable(parseErr.Error())
	}
	const clock = "15:04:05.000"
	_, err := fmt.Fprintf(f.out, "%s  %s  %s\n", now.Format(clock), message.Printable(row.Subject), text)

	return err
}
