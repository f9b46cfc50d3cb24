package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/machinebus/machinebus/bus"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func newDrivers(conn *connection) *cobra.Command {
	var watch bool
	cmd := &cobra.Command{
		Use:     "drivers [provider]",
		Aliases: []string{"driver"},
		Short:   "List the driver replicas on the bus",
		Long: `List the driver replicas on the bus, one row for each replica and control plane.

A replica gives a sign of life every half second; mcmctl listens for a little more
than two of them. RUNNING and SLOTS count the operations of all control planes
together. STATE is serving, draining (takes no new work) or silent (not heard of
for so long that mcm takes it for dead). LEASED says whether the operations stream
acknowledges the replica's sessions. Without a lease, as when NATS has no JetStream,
its operations are neither claimed nor fenced. Plain drivers, which only answer
requests, give no sign of life and are not listed.`,
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

		return conn.show(cmd, watch, func(w io.Writer, heard []replica, now time.Time) error {
			return printDrivers(w, heard, now, provider, out.value, watch)
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
	Running        uint32    `json:"running"`
	Slots          uint32    `json:"slots"`
	Operations     int       `json:"operations"` // of this cluster, settled ones that mcm has not acknowledged included
	CreateIdentity string    `json:"createIdentity"`
	SettleSeconds  float64   `json:"settleSeconds"`
	Kind           string    `json:"kind"`
	APIVersions    []string  `json:"apiVersions"`
	Capabilities   []string  `json:"capabilities"`
	Protocol       uint32    `json:"protocol"`
	Leased         bool      `json:"leased"`
	SessionID      string    `json:"sessionId"`
	Epoch          uint64    `json:"epoch"` // the highest the replica has seen
	StartedAt      time.Time `json:"startedAt"`
	LastSeen       time.Time `json:"lastSeen"`
}

func rowOf(r replica, now time.Time) driverRow {
	s := r.session
	row := driverRow{
		Cluster: s.GetCluster(), Provider: s.GetProvider(), Replica: s.GetReplica(),
		Version: s.GetVersion(), Host: s.GetHostname(), State: stateOf(r, now),
		Running: s.GetRunning(), Slots: s.GetSlots(), Operations: len(s.GetOperations()),
		CreateIdentity: bus.IdentityName(s.GetCreateIdentity()), SettleSeconds: s.GetSettleTime().AsDuration().Seconds(),
		Kind: s.GetKind(), APIVersions: append([]string{}, s.GetApiVersions()...),
		Capabilities: verbs(s.GetCapabilities()), Protocol: s.GetProtocol(),
		Leased: s.GetLeased(), SessionID: s.GetSessionId(), Epoch: s.GetEpoch(),
		LastSeen: r.at.UTC(),
	}
	if s.GetStartedAt() != nil {
		row.StartedAt = s.GetStartedAt().AsTime()
	}

	return row
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}

	return "no"
}

func stateOf(r replica, now time.Time) string {
	switch {
	case r.silent(now):
		return "silent"
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

func printDrivers(w io.Writer, heard []replica, now time.Time, provider, out string, compact bool) error {
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
		return printJSON(w, rows, compact)
	}
	header := []string{"CLUSTER", "PROVIDER", "REPLICA", "VERSION", "HOST", "STATE", "LEASED", "RUNNING", "SLOTS", "AGE", "LAST-SEEN"}
	if out == formatWide {
		header = append(header, "IDENTITY", "KIND", "APIVERSIONS", "CAPABILITIES")
	}
	table := make([][]string, 0, len(rows))
	for _, r := range rows {
		started := ""
		if !r.StartedAt.IsZero() {
			started = age(now.Sub(r.StartedAt))
		}
		cells := []string{
			r.Cluster, r.Provider, r.Replica, r.Version, r.Host, r.State, yesNo(r.Leased),
			strconv.Itoa(int(r.Running)), strconv.Itoa(int(r.Slots)), started, age(now.Sub(r.LastSeen)),
		}
		if out == formatWide {
			cells = append(cells, r.CreateIdentity, r.Kind, strings.Join(r.APIVersions, ","), strings.Join(r.Capabilities, ","))
		}
		table = append(table, cells)
	}

	return printTable(w, header, table)
}

// noReplica tells what is there instead of what was asked for.
func noReplica(provider string, others []string) error {
	slices.Sort(others)
	switch others = slices.Compact(others); {
	case len(others) > 0:
		return fmt.Errorf("no driver replica of provider %s was heard; there are replicas of: %s",
			provider, strings.Join(others, ", "))
	case provider != "":
		return fmt.Errorf("no driver replica of provider %s is heard", provider)
	default:
		return fmt.Errorf("no driver replica is heard")
	}
}
