package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/cmd/mcmctl/message"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func newOps(conn *connection) *cobra.Command {
	var watch bool
	var provider string
	cmd := &cobra.Command{
		Use:     "ops [machine]",
		Aliases: []string{"operations"},
		Short:   "List the operations in flight and the newest outcomes",
		Long: `List operations: creates, initializes and deletes of machines. Reads are too short
to list. At most the oldest 1000 that wait and the newest 200 that ended are listed.

The machine is given as its name or as namespace/name. STATE is one of:
  waiting   waits at mcm; PROGRESS says for what
  running   a driver replica runs it
  stuck     the driver ignores its deadline: restart the replica
  lost      its replica is silent: mcm is about to send it to another one
  settled   done with the code shown; mcm has not acknowledged the outcome yet
  ended     done with the code shown

TRY counts the operations settled for the machine before; a failed operation is
followed by one with a higher TRY. ATTEMPT counts how often this one was sent.
ELAPSED is how long it has been waiting or running. If no driver runs, name a
control plane other than "default" with --cluster, so that mcmctl asks its mcm.`,
		Example: `  mcmctl ops
  mcmctl ops default/worker-1 --watch
  mcmctl ops -o wide --provider virtual   # the operation ids, too`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "refresh every second until Ctrl-C")
	cmd.Flags().StringVar(&provider, "provider", "", "only operations at this provider")
	mustComplete(cmd, "provider", cobra.NoFileCompletions)
	out := addFormat(cmd, formatTable, formatWide, formatJSON)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		machine := ""
		if len(args) > 0 {
			machine = args[0]
		}

		return conn.show(cmd, watch, func(w io.Writer, heard picture, now time.Time) error {
			rows := operations(heard, now, strings.ToLower(provider), machine)

			return printOps(w, rows, out.value, watch, len(heard.replicas))
		})
	}

	return cmd
}

// opRow is an operation in JSON.
type opRow struct {
	Cluster        string  `json:"cluster"`
	Provider       string  `json:"provider"`
	Namespace      string  `json:"namespace"`
	Name           string  `json:"name"`
	Operation      string  `json:"operation"`
	OperationID    string  `json:"operationId"`
	Try            int     `json:"try"`
	Attempt        uint32  `json:"attempt"`
	Replica        string  `json:"replica"`
	ElapsedSeconds float64 `json:"elapsedSeconds"`
	State          string  `json:"state"`
	Code           string  `json:"code,omitempty"` // set once settled
	Progress       string  `json:"progress,omitempty"`
	Message        string  `json:"message,omitempty"` // of one that has ended with an error
}

// operations lists what the replicas hold, what waits, and what has ended, for one
// machine, or for all if machine is empty.
func operations(heard picture, now time.Time, provider, machine string) []opRow {
	rows, held := []opRow{}, map[string]bool{}
	add := func(row opRow) {
		if (provider == "" || provider == row.Provider) &&
			(machine == "" || machine == row.Name || machine == row.Namespace+"/"+row.Name) {
			rows = append(rows, row)
		}
	}
	for _, r := range heard.replicas {
		for _, op := range r.session.GetOperations() {
			if !op.GetStuck() { // mcm got an answer for a stuck one and sent it elsewhere
				held[r.session.GetCluster()+"/"+op.GetOperationId()] = true
			}
			add(opRowOf(r, op, now))
		}
	}
	for _, cluster := range slices.Sorted(maps.Keys(heard.queues)) {
		for _, op := range heard.queues[cluster].GetOperations() {
			if !held[cluster+"/"+op.GetOperationId()] {
				add(waitingRow(cluster, op, now.Sub(heard.queues[cluster].at)))
			}
		}
	}
	for _, a := range heard.outcomes {
		if !held[a.GetCluster()+"/"+a.GetOperationId()] {
			add(endedRow(a))
		}
	}

	return rows
}

func waitingRow(cluster string, op *driverv1.OperationState, since time.Duration) opRow {
	return opRow{
		Cluster: cluster, Provider: op.GetProvider(), Namespace: op.GetNamespace(), Name: op.GetName(),
		Operation: bus.Verb(op.GetOperation()), OperationID: op.GetOperationId(), Try: tryOf(op.GetOperationId()),
		Attempt: op.GetAttempt(), ElapsedSeconds: (op.GetElapsed().AsDuration() + since).Seconds(),
		State: "waiting", Progress: op.GetLastProgress(),
	}
}

func endedRow(a *driverv1.Audit) opRow {
	return opRow{
		Cluster: a.GetCluster(), Provider: a.GetProvider(), Replica: a.GetReplica(),
		Namespace: a.GetNamespace(), Name: a.GetName(), Operation: bus.Verb(a.GetOperation()),
		OperationID: a.GetOperationId(), Try: tryOf(a.GetOperationId()), Attempt: a.GetAttempts(),
		ElapsedSeconds: a.GetTook().AsDuration().Seconds(), State: "ended", Code: bus.CodeName(a.GetStatus().GetCode()),
		Message: a.GetStatus().GetMessage(),
	}
}

// tryOf returns the number at the end of an operation's id, 0 if there is none.
func tryOf(id string) int {
	n, err := strconv.Atoi(id[strings.LastIndexByte(id, '.')+1:])
	if err != nil {
		return 0
	}

	return n
}

func opRowOf(r knownReplica, op *driverv1.OperationState, now time.Time) opRow {
	row := opRow{
		Cluster: r.session.GetCluster(), Provider: r.session.GetProvider(), Replica: r.session.GetReplica(),
		Namespace: op.GetNamespace(), Name: op.GetName(), Operation: bus.Verb(op.GetOperation()),
		OperationID: op.GetOperationId(), Try: tryOf(op.GetOperationId()), Attempt: op.GetAttempt(), Progress: op.GetLastProgress(),
	}
	elapsed := op.GetElapsed().AsDuration()
	switch {
	case op.GetSettled():
		row.State, row.Code = "settled", bus.CodeName(op.GetCode())
	case r.silent(now):
		row.State = "lost"
	case op.GetStuck():
		row.State = "stuck"
		elapsed += now.Sub(r.at)
	default:
		row.State = "running"
		elapsed += now.Sub(r.at)
	}
	row.ElapsedSeconds = elapsed.Seconds()

	return row
}

func printOps(w io.Writer, rows []opRow, out string, compact bool, replicas int) error {
	if out == formatJSON {
		return message.WriteJSON(w, rows, compact)
	}
	if len(rows) == 0 {
		_, err := fmt.Fprintf(w, "no operation in flight (replicas heard: %d)\n", replicas)

		return err
	}
	header := []string{"CLUSTER", "PROVIDER", "MACHINE", "OP", "TRY", "ATTEMPT", "REPLICA", "ELAPSED", "STATE", "PROGRESS"}
	if out == formatWide {
		header = append(header, "OPERATION-ID", "MESSAGE")
	}
	table := make([][]string, 0, len(rows))
	for _, r := range rows {
		cells := []string{
			r.Cluster, r.Provider, r.Namespace + "/" + r.Name, r.Operation, strconv.Itoa(r.Try), strconv.Itoa(int(r.Attempt)), r.Replica,
			age(time.Duration(r.ElapsedSeconds * float64(time.Second))), strings.TrimSpace(r.State + " " + r.Code), r.Progress,
		}
		if out == formatWide {
			cells = append(cells, r.OperationID, r.Message)
		}
		table = append(table, cells)
	}

	return printTable(w, header, table)
}
