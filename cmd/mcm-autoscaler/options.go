package main

import (
	"errors"
	"fmt"
	"net"
	"runtime/debug"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // --logging-format=json
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/machinebus/machinebus/mcm/autoscaler"
)

// options holds the flags.
type options struct {
	kubeconfig, targetKubeconfig string
	namespace                    string
	allNamespaces                bool
	listen                       string
	tls                          tlsOptions
	nats                         natsOptions
	nodes                        []string
	groups                       []autoscaler.Group // of nodes
	marks                        autoscaler.Marks
	gpuLabel                     string

	address   string
	port      int
	kubeQPS   float32
	kubeBurst int
	logging   *logsapi.LoggingConfiguration
}

func newCommand() *cobra.Command {
	o := &options{marks: autoscaler.MarksWithTime, logging: logsapi.NewLoggingConfiguration()}
	cmd := &cobra.Command{
		Use:   "mcm-autoscaler",
		Short: "Lets the stock cluster-autoscaler scale MachineDeployments and node groups of drivers",
		Long: `mcm-autoscaler serves the cluster-autoscaler, version 1.25 or later, when that runs with
--cloud-provider=externalgrpc.

A MachineDeployment is a node group if it has the annotation
cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size (and -min-size, 0 if
absent), or if --nodes names it. With --nats-url it also serves the node groups of
drivers on the bus, as provider:<provider>/<id>. Clients need a certificate signed by
--client-ca. Certificate files are read again for each connection.`,
		Example: `  mcm-autoscaler --namespace=shop --tls-cert=tls.crt --tls-key=tls.key --client-ca=ca.crt
  mcm-autoscaler --nodes=1:10:shop.workers --kubeconfig=$HOME/.kube/config --allow-plaintext`,
		Version:       version(),
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.complete(); err != nil {
				return err
			}
			if err := logsapi.ValidateAndApply(o.logging, nil); err != nil {
				return fmt.Errorf("logging flags: %w", err)
			}
			ctrl.SetLogger(klog.Background())

			return run(cmd.Context(), o)
		},
	}
	o.addFlags(cmd.Flags())
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		return fmt.Errorf("%w (mcm-autoscaler --help lists the flags)", err)
	})

	return cmd
}

func (o *options) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.kubeconfig, "kubeconfig", "",
		"kubeconfig of the cluster that holds the MachineDeployments; empty means the cluster that mcm-autoscaler runs in")
	fs.StringVar(&o.targetKubeconfig, "target-kubeconfig", "", "kubeconfig of the cluster that the nodes join; empty means that of --kubeconfig")
	fs.StringVar(&o.namespace, "namespace", "default", "namespace of the MachineDeployments")
	fs.BoolVar(&o.allNamespaces, "all-namespaces", false, "serve the MachineDeployments of all namespaces")
	fs.StringArrayVar(&o.nodes, "nodes", nil,
		"node group as min:max:namespace.name, which overrides the MachineDeployment's annotations; may be repeated; a max of 0 hides it")
	fs.TextVar(&o.marks, "marks", o.marks, "how to mark machines for deletion: annotation, or annotation-names "+
		"for machine controller managers from v0.56 to v0.61.2; older ones are not supported")
	fs.StringVar(&o.gpuLabel, "gpu-label", "", "label of nodes with GPUs")

	fs.StringVar(&o.listen, "listen", "", "address for the cluster-autoscaler; empty means :8086, and 127.0.0.1:8086 with --allow-plaintext")
	fs.StringVar(&o.tls.cert, "tls-cert", "", "PEM file with the server's certificate; its names must include the host in the cluster-autoscaler's cloud-config")
	fs.StringVar(&o.tls.key, "tls-key", "", "PEM file with the key of --tls-cert")
	fs.StringVar(&o.tls.clientCA, "client-ca", "",
		"PEM file with the authority that signs client certificates; a client with one can delete the nodes of a group down to its minimum")
	fs.BoolVar(&o.tls.plaintext, "allow-plaintext", false, "serve without TLS: anyone who reaches the port can delete nodes")

	o.nats.addFlags(fs)

	fs.StringVar(&o.address, "address", "0.0.0.0", "address for /metrics, /healthz and /readyz")
	fs.IntVar(&o.port, "port", 10260, "port for /metrics, /healthz and /readyz")
	fs.Float32Var(&o.kubeQPS, "kube-api-qps", 50, "most requests per second to each API server; negative for no limit")
	fs.IntVar(&o.kubeBurst, "kube-api-burst", 100, "most requests at once to each API server")
	logsapi.AddFlags(o.logging, fs)
}

// complete sets defaults, and returns an error that names all invalid flags.
func (o *options) complete() error {
	o.nats.complete()
	errs := []error{o.tls.validate(), o.nats.validate()}
	seen := map[string]bool{}
	for _, text := range o.nodes {
		g, err := autoscaler.ParseGroup(text)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("--nodes: %w", err))
		case seen[g.Deployment.String()]:
			errs = append(errs, fmt.Errorf("--nodes: %s is given twice", g.Deployment))
		case !o.allNamespaces && g.Deployment.Namespace != o.namespace:
			errs = append(errs, fmt.Errorf("--nodes=%s: only namespace %s is served: change --namespace or set --all-namespaces", text, o.namespace))
		}
		seen[g.Deployment.String()] = true
		o.groups = append(o.groups, g)
	}
	if o.listen == "" {
		o.listen = o.tls.listen()
	}
	if _, _, err := net.SplitHostPort(o.listen); err != nil {
		errs = append(errs, fmt.Errorf("--listen: %w", err))
	}
	if net.ParseIP(o.address) == nil {
		errs = append(errs, fmt.Errorf("--address %q is not an IP address", o.address))
	}
	if o.port < 1 || o.port > 65535 {
		errs = append(errs, fmt.Errorf("--port must be in 1..65535, not %d", o.port))
	}
	if o.namespace == "" {
		errs = append(errs, errors.New("--namespace is empty: set it, or use --all-namespaces"))
	}

	return errors.Join(errs...)
}

func (o *options) healthAddress() string { return net.JoinHostPort(o.address, strconv.Itoa(o.port)) }

func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}

	return "unknown"
}
