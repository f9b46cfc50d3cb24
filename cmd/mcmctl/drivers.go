package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/cmd/mcmctl/message"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func newDrivers(conn *connection) *cobra.Command {
	var watch bool
	cmd := &cobra.Command{
		Use:     "drivers [provider]",
		Aliases: []string{"driver"},
		Short:   "List the driver replicas on the bus",
		Long: `List the driver replicas on the bus, one row for each replica and control plane.

A replica sends a heartbeat every half second; mcmctl listens for a little more than
two of them. RUNNING and SLOTS count the operations of all control planes together.
REQUESTS, ERRORS and LATENCY, the average time of an operation, count from the
replica's start. STATE is one of:
  serving    takes work
  draining   takes no new work
  silent     missed so many heartbeats that mcm considers it dead
  refused    mcm gives it no work; -o wide shows why as LAST-ERROR
  plain      a driver without heartbeats, which only answers requests

A plain driver is listed if it answers NATS service discovery under the name
mcm-driver-<provider>, as nats.go's package micro does. Otherwise it is not listed,
although mcm sends it requests.`,
		Example: `  mcmctl drivers
  mcmctl drivers virtual --watch
  mcmctl drivers -o wide        # create identity, kinds, capabilities, too
  mcmctl drivers -o json | jq -r '.[] | select(.state == "draining") | .replica'`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "refresh every second until Ctrl-C")
	out := addFormat(cmd, formatTable, formatWide, formatJSON)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		provider := ""
		if len(args) > 0 {
			provider = strings.ToLower(args[0])
		}

		return conn.show(cmd, watch, func(w io.Writer, heard picture, now time.Time) error {
			return printDrivers(w, heard.replicas, now, provider, out.value, watch)
		})
	}

	return cmd
}

// driverRow is a replica in JSON.
type driverRow struct {
	Cluster        string    `json:"cluster"`
	Provider       string    `json:"provider"`
	Replica        string    `json:"replica"`
	Version        string    `json:"version"`
	Host           string    `json:"host"`
	State          string    `json:"state"`
	Plain          bool      `json:"plain,omitempty"`
	Running        uint32    `json:"running"`
	Slots          uint32    `json:"slots"`
	Requests       *int      `json:"requests"` // these four since the replica's start; null if unknown
	Errors         *int      `json:"errors"`
	LastError      string    `json:"lastError,omitempty"`
	LatencySeconds float64   `json:"latencySeconds"` // on average
	Operations     int       `json:"operations"`     // of this cluster, including settled ones that mcm has not acknowledged
	CreateIdentity string    `json:"createIdentity"`
	SettleSeconds  float64   `json:"settleSeconds"`
	Kind           string    `json:"kind"`
	APIVersions    []string  `json:"apiVersions"`
	Capabilities   []string  `json:"capabilities"`
	Protocol       uint32    `json:"protocol"`
	Refused        string    `json:"refused,omitempty"` // why managers of this build give it no work
	Epoch          uint64    `json:"epoch"`             // the highest the replica has seen
	StartedAt      time.Time `json:"startedAt"`
	LastSeen       time.Time `json:"lastSeen"`
}

func rowOf(r knownReplica, now time.Time) driverRow {
	s := r.session
	row := driverRow{
		Cluster: s.GetCluster(), Provider: s.GetProvider(), Replica: s.GetReplica(),
		Version: s.GetVersion(), Host: s.GetHostname(), State: stateOf(r, now),
		Running: s.GetRunning(), Slots: s.GetSlots(), Operations: len(s.GetOperations()),
		CreateIdentity: bus.IdentityName(s.GetCreateIdentity()), SettleSeconds: s.GetSettleTime().AsDuration().Seconds(),
		Kind: s.GetKind(), APIVersions: append([]string{}, s.GetApiVersions()...),
		Capabilities: verbs(s.GetCapabilities()), Protocol: s.GetProtocol(),
		LastSeen: r.at.UTC(), Plain: r.plain,
		LastError: r.figures.LastError, LatencySeconds: r.figures.Latency.Seconds(),
		Epoch: s.GetEpoch(),
	}
	if r.counted {
		row.Requests, row.Errors = &r.figures.Requests, &r.figures.Errors
	}
	if why := bus.Refused(s); why != nil && !r.plain {
		row.Refused = why.Error()
	}
	if s.GetStartedAt() != nil {
		row.StartedAt = s.GetStartedAt().AsTime()
	}

	return row
}

func stateOf(r knownReplica, now time.Time) string {
	switch {
	case r.plain:
		return "plain"
	case r.silent(now):
		return "silent"
	case bus.Refused(r.session) != nil:
		return "refused"
	case r.session.GetDraining():
		return "draining"
	default:
		return "serving"
	}
}

func verbs(ops []driverv1.Operation) []string {
	names := []string{}
	for _, op := range ops {
		names = append(names, bus.Verb(op))
	}

	return names
}

func printDrivers(w io.Writer, heard []knownReplica, now time.Time, provider, out string, compact bool) error {
	rows, others := []driverRow{}, []string{}
	for _, r := range heard {
		if provider == "" || r.session.GetProvider() == provider {
			rows = append(rows, rowOf(r, now))
		} else {
			others = append(others, r.session.GetProvider())
		}
	}
	if len(rows) == 0 && out != formatJSON {
		return noReplica(provider, others)
	}
	if out == formatJSON {
		return message.WriteJSON(w, rows, compact)
	}
	header := []string{
		"CLUSTER", "PROVIDER", "REPLICA", "VERSION", "HOST", "STATE", "RUNNING", "SLOTS", "REQUESTS", "ERRORS", "LATENCY",
		"AGE", "LAST-SEEN",
	}
	if out == formatWide {
		header = append(header, "IDENTITY", "KIND", "APIVERSIONS", "CAPABILITIES", "LAST-ERROR")
	}
	table := make([][]string, 0, len(rows))
	for _, r := range rows {
		table = append(table, r.cells(now, out == formatWide))
	}

	return printTable(w, header, table)
}

// cells returns the columns of a row; unknown values are empty.
func (r *driverRow) cells(now time.Time, wide bool) []string {
	var running, slots, requests, failed, latency, started string
	if !r.Plain {
		running, slots = strconv.Itoa(int(r.Running)), strconv.Itoa(int(r.Slots))
	}
	if r.Requests != nil && r.Errors != nil {
		requests, failed = strconv.Itoa(*r.Requests), strconv.Itoa(*r.Errors)
	}
	if r.LatencySeconds > 0 {
		latency = time.Duration(r.LatencySeconds * float64(time.Second)).Round(10 * time.Microsecond).String()
	}
	if !r.StartedAt.IsZero() {
		started = age(now.Sub(r.StartedAt))
	}
	cells := []string{
		r.Cluster, r.Provider, r.Replica, r.Version, r.Host, r.State, running, slots, requests, failed, latency,
		started, age(now.Sub(r.LastSeen)),
	}
	if wide {
		cells = append(cells, r.CreateIdentity, r.Kind, strings.Join(r.APIVersions, ","), strings.Join(r.Capabilities, ","), cmp.Or(r.Refused, r.LastError))
	}

	return cells
}

// noReplica returns the error for a provider without replicas; others are the
// providers that have some.
func noReplica(provider string, others []string) error {
	slices.Sort(others)
	switch others = slices.Compact(others); {
	case len(others) > 0:
		return fmt.Errorf("no driver replica of provider %s was heard; there are replicas of: %s",
			provider, strings.Join(others, ", "))
	case provider != "":
		return fmt.Errorf("no driver replica of provider %s was heard", provider)
	default:
		return fmt.Errorf("no driver replica was heard")
	}
}
