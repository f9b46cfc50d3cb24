package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// watch shows the machines until reached returns nil. It returns an error if ctx ends or
// a process dies. what completes the sentence "waited until ...".
func (s *setup) watch(ctx context.Context, what string, reached func(context.Context, []v1alpha1.Machine) error) error {
	view := &liveView{narrator: s.narrator}
	return s.site.Poll(ctx, what, func(ctx context.Context) error {
		machines, err := s.machines(ctx)
		if err != nil {
			return err
		}
		view.show(machines)
		return reached(ctx, machines)
	})
}

// machines returns the demo's machines, sorted by name.
func (s *setup) machines(ctx context.Context) ([]v1alpha1.Machine, error) {
	var list v1alpha1.MachineList
	if err := s.kube.List(ctx, &list, client.InNamespace(s.cluster.Namespace)); err != nil {
		return nil, err
	}
	slices.SortFunc(list.Items, func(a, b v1alpha1.Machine) int { return strings.Compare(a.Name, b.Name) })
	return list.Items, nil
}

// allRunning returns an error unless every machine is Running.
func allRunning(_ context.Context, machines []v1alpha1.Machine) error {
	running := 0
	for i := range machines {
		if machines[i].Status.CurrentStatus.Phase == v1alpha1.MachineRunning {
			running++
		}
	}
	if running != machineCount || len(machines) != machineCount {
		return fmt.Errorf("%d of %d machines are", running, machineCount)
	}
	return nil
}

// noneLeft returns an error unless all machines are gone.
func noneLeft(_ context.Context, machines []v1alpha1.Machine) error {
	if len(machines) > 0 {
		return fmt.Errorf("%d are left", len(machines))
	}
	return nil
}

// A liveView prints a table on a terminal, and elsewhere a line for each change.
type liveView struct {
	*narrator

	last  string
	lines int // of the table on the terminal
}

func (v *liveView) show(machines []v1alpha1.Machine) {
	if !v.terminal {
		if counts := phaseCounts(machines); counts != v.last {
			v.last = counts
			v.detailf("Machines: %s", counts)
		}
		return
	}
	table := machineTable(machines)
	if table == v.last {
		return
	}
	v.last = table
	if v.lines > 0 {
		fmt.Fprintf(v.out, "\x1b[%dA\x1b[J", v.lines) // up to the table's first line, and clear from there
	}
	v.lines = strings.Count(table, "\n")
	fmt.Fprint(v.out, table)
}

func phaseCounts(machines []v1alpha1.Machine) string {
	if len(machines) == 0 {
		return "none"
	}
	counts := map[string]int{}
	for i := range machines {
		counts[phase(&machines[i])]++
	}
	var parts []string
	for _, p := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%d %s", counts[p], p))
	}
	return strings.Join(parts, ", ")
}

func phase(m *v1alpha1.Machine) string {
	if m.Status.CurrentStatus.Phase == v1alpha1.MachinePhaseNew {
		return "new"
	}
	return string(m.Status.CurrentStatus.Phase)
}

func machineTable(machines []v1alpha1.Machine) string {
	const description = 60
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "    MACHINE\tPHASE\tNODE\tLAST OPERATION")
	for i := range machines {
		m := &machines[i]
		text, _, _ := strings.Cut(m.Status.LastOperation.Description, "\n")
		if len(text) > description {
			text = text[:description-3] + "..."
		}
		fmt.Fprintf(w, "    %s\t%s\t%s\t%s\n", m.Name, phase(m), m.Labels[v1alpha1.LabelKeyNode], text)
	}
	if err := w.Flush(); err != nil {
		return ""
	}
	return b.String()
}
