package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/cluster"

	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/mcm/machine"
	"github.com/machinebus/machinebus/mcm/machineclass"
	"github.com/machinebus/machinebus/mcm/machinedeployment"
	"github.com/machinebus/machinebus/mcm/machineset"
	"github.com/machinebus/machinebus/mcm/orphans"
	"github.com/machinebus/machinebus/mcm/overshoot"
)

// A controller can be switched on and off with --controllers.
type controller struct {
	name string
	add  func(*mcm, context.Context) error
}

// controllers lists all controllers. All are on by default.
var controllers = []controller{
	{"machine", (*mcm).addMachine},
	{"machineclass", (*mcm).addMachineClass},
	{"machineset", (*mcm).addMachineSet},
	{"machinedeployment", (*mcm).addMachineDeployment},
	{"freeze", (*mcm).addFreeze},
	{"safety", (*mcm).addOrphans},
}

func controllerNames() []string {
	names := make([]string, 0, len(controllers))
	for _, c := range controllers {
		names = append(names, c.name)
	}

	return names
}

// selected reports whether a list like that of the Kubernetes controller manager
// switches a controller on: "*" means all, "name" one, "-name" all but that one. The
// first entry that names the controller decides.
func selected(list []string, name string) bool {
	for _, entry := range list {
		switch entry {
		case name:
			return true
		case "-" + name:
			return false
		}
	}

	return slices.Contains(list, "*")
}

// validateControllers returns an error for unknown names: a misspelt one would run the
// controller that it was meant to stop.
func validateControllers(list []string) error {
	for _, entry := range list {
		if entry != "*" && !slices.Contains(controllerNames(), strings.TrimPrefix(entry, "-")) {
			return fmt.Errorf("--controllers: unknown controller %q: want one of %s",
				strings.TrimPrefix(entry, "-"), strings.Join(controllerNames(), ", "))
		}
	}

	return nil
}

// addControllers adds the controllers that are switched on.
func (m *mcm) addControllers(ctx context.Context) error {
	if err := register([]prometheus.Collector{scrapeFailures}); err != nil {
		return err
	}
	for _, c := range controllers {
		if !selected(m.options.controllers, c.name) {
			continue
		}
		if err := c.add(m, ctx); err != nil {
			return fmt.Errorf("set up the controller %s: %w", c.name, err)
		}
	}

	return nil
}

func (m *mcm) addMachine(ctx context.Context) error {
	r := m.reconciler
	r.Live = m.manager.GetAPIReader()
	var nodes cache.Cache
	if m.target != nil {
		nodes = m.target.GetCache()
		r.Target, r.Drainer = m.target.GetClient(), m.drainer
		r.LiveNodes = m.target.GetAPIReader()
	}
	if m.tokens != nil {
		r.Tokens = m.tokens
	}
	if err := m.addOutageGuard(); err != nil {
		return err
	}
	if err := register(append(r.Collectors(), r.OutageGuard.Collectors()...)); err != nil {
		return err
	}
	if err := m.registerInventory(machine.NewInventory(ctx, counted(m.manager.GetClient(), "Machine-count"))); err != nil {
		return err
	}

	return r.SetupWithManager(ctx, m.manager, nodes, m.dispatcher, m.options.workers)
}

// addOutageGuard adds the guard that freezes machines while an API server cannot be read.
func (m *mcm) addOutageGuard() error {
	control, err := unlimited(m.manager)
	if err != nil {
		return err
	}
	guard := &machine.OutageGuard{
		Control: control, Namespace: m.options.scope(), Settings: m.options.outage, Unwatched: m.lock.Unwatched, Events: m.events,
	}
	if m.options.lease.elect {
		guard.Memory = m.lock
	}
	if m.target != nil {
		if guard.Target, err = unlimited(m.target); err != nil {
			return err
		}
	}
	m.reconciler.OutageGuard = guard

	return m.manager.Add(guard)
}

// unlimited returns a client without cache and without the limit of --kube-api-qps,
// behind which waiting would look like an outage.
func unlimited(c cluster.Cluster) (client.Client, error) {
	cfg := rest.CopyConfig(c.GetConfig())
	cfg.QPS = -1
	direct, err := client.New(cfg, client.Options{HTTPClient: c.GetHTTPClient(), Scheme: c.GetScheme(), Mapper: c.GetRESTMapper()})
	if err != nil {
		return nil, fmt.Errorf("connect to the API server at %s: %w", cfg.Host, err)
	}

	return direct, nil
}

func (m *mcm) addMachineClass(ctx context.Context) error {
	c := m.manager.GetClient()
	if err := machineclass.NewClassReconciler(c, m.events).SetupWithManager(ctx, m.manager); err != nil {
		return err
	}

	if err := machineclass.NewSecretReconciler(c, m.events).SetupWithManager(ctx, m.manager); err != nil {
		return err
	}
	m.validator = machineclass.NewValidator(
		ctx, c, m.events, dispatch.NewClasses(m.caller), m.options.settings.DefaultProvider)

	return m.validator.SetupWithManager(m.manager)
}

func (m *mcm) addMachineSet(ctx context.Context) error {
	if err := register(machineset.Collectors()); err != nil {
		return err
	}
	if err := m.registerInventory(machineset.NewInventory(ctx, counted(m.manager.GetClient(), "Machineset-count"))); err != nil {
		return err
	}
	sets := &machineset.Reconciler{Client: m.manager.GetClient(), Live: m.manager.GetAPIReader(), Events: m.events}

	return sets.SetupWithManager(ctx, m.manager, m.options.setWorkers)
}

func (m *mcm) addMachineDeployment(ctx context.Context) error {
	settings := m.options.deployments
	settings.Namespace = m.options.scope()
	deployments := &machinedeployment.Reconciler{
		Control: m.manager.GetClient(), Live: m.manager.GetAPIReader(), Events: m.events, Settings: settings,
	}
	if m.target != nil {
		deployments.Target = m.target.GetClient()
	}
	if err := m.registerInventory(machinedeployment.NewInventory(ctx, counted(m.manager.GetClient(), "Machinedeployment-count"))); err != nil {
		return err
	}

	return deployments.SetupWithManager(ctx, m.manager, m.options.setWorkers)
}

func (m *mcm) addFreeze(ctx context.Context) error {
	c, settings := m.manager.GetClient(), m.options.overshoot
	sets := &overshoot.SetReconciler{Client: c, Live: m.manager.GetAPIReader(), Events: m.events, Settings: settings}
	if err := sets.SetupWithManager(ctx, m.manager); err != nil {
		return err
	}
	deployments := &overshoot.DeploymentReconciler{Client: c, Settings: settings}

	return deployments.SetupWithManager(ctx, m.manager)
}

// uncertain returns why an instance without a Machine may belong to another manager; nil
// if no other manager of this cluster name was heard.
func (m *mcm) uncertain() error { return cmp.Or(m.namesake.Heard(), m.epochs.Beside()) }

// addOrphans adds what looks for instances without a machine.
func (m *mcm) addOrphans(ctx context.Context) error {
	o, settings := m.options, m.options.orphans
	settings.DefaultProvider, settings.Namespace = o.settings.DefaultProvider, o.scope()
	settings.NodeGrace, settings.DeleteTimeout = o.settings.CreationTimeout, o.settings.OperationTimeout
	collector := &orphans.Collector{
		Reader: m.manager.GetAPIReader(), Cache: m.manager.GetClient(), Dispatcher: m.dispatcher,
		Events: m.events, Metrics: orphans.NewMetrics(), Settings: settings, Owner: m.owner, Barred: m.uncertain,
	}
	if len(settings.AdoptOwners) > 0 {
		klog.Background().Info("adopted the instances of these owners: those without a machine are deleted (--adopt-owner)",
			"owners", settings.AdoptOwners, "owner", m.owner)
	}
	if m.target != nil {
		collector.Nodes = m.target.GetClient()
	}
	if m.tokens != nil {
		collector.Tokens = m.tokens
	}
	if err := register(collector.Metrics.Collectors()); err != nil {
		return err
	}
	if err := collector.Watch(ctx, m.manager.GetCache()); err != nil {
		return err
	}

	return m.manager.Add(collector)
}
