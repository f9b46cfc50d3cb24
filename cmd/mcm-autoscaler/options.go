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

// options are the flags.
type options struct {
	kubeconfig, targetKubeconfig string
	namespace                    string
	allNamespaces                bool
	listen                       string
	door                         door
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
		Short: "Lets the stock cluster-autoscaler scale MachineDeployments, and node groups of drivers",
		Long: `mcm-autoscaler is what the cluster-autoscaler talks to when it runs with
--cloud-provider=externalgrpc, version 1.25 or later.

A MachineDeployment is a node group if it has the annotation
cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size (and -min-size, 0 if
absent), or if --nodes names it. With --nats-url the node groups that drivers serve
over the bus are there as well, as provider:<provider>/<id>. Who may connect has to
show a certificate of --client-ca. Certificates are read again for each connection.`,
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
		"kubeconfig of the cluster that holds the MachineDeployments; empty means the one that mcm-autoscaler runs in")
	fs.StringVar(&o.targetKubeconfig, "target-kubeconfig", "", "kubeconfig of the cluster that the nodes join; empty means the same")
	fs.StringVar(&o.namespace, "namespace", "default", "namespace of the MachineDeployments")
	fs.BoolVar(&o.allNamespaces, "all-namespaces", false, "serve the MachineDeployments of all namespaces")
	fs.StringArrayVar(&o.nodes, "nodes", nil,
		"node group as min:max:namespace.name, whatever the MachineDeployment's annotations say; may be repeated; a max of 0 hides it")
	fs.TextVar(&o.marks, "marks", o.marks, "how to name machines to be deleted: annotation, or annotation-names "+
		"for machine controller managers from v0.56 to v0.61.2; older ones cannot be served")
	fs.StringVar(&o.gpuLabel, "gpu-label", "", "label of nodes with GPUs")

	fs.StringVar(&o.listen, "listen", "", "address for the cluster-autoscaler; empty means :8086, and 127.0.0.1:8086 with --allow-plaintext")
	fs.StringVar(&o.door.cert, "tls-cert", "", "PEM file with the certificate; its names must include the host of the cluster-autoscaler's cloud-config")
	fs.StringVar(&o.door.key, "tls-key", "", "PEM file with the certificate's key")
	fs.StringVar(&o.door.clientCA, "client-ca", "", "PEM file with the authority of the certificates that clients must have; who has one can delete every node of a group, down to its minimum")
	fs.BoolVar(&o.door.plaintext, "allow-plaintext", false, "serve without TLS: whoever reaches the port can delete every node")

	o.nats.addFlags(fs)

	fs.StringVar(&o.address, "address", "0.0.0.0", "address for /metrics, /healthz and /readyz")
	fs.IntVar(&o.port, "port", 10260, "port for /metrics, /healthz and /readyz")
	fs.Float32Var(&o.kubeQPS, "kube-api-qps", 50, "requests a second to each API server at most; negative for no limit")
	fs.IntVar(&o.kubeBurst, "kube-api-burst", 100, "requests to each API server at once at most")
	logsapi.AddFlags(o.logging, fs)
}

// complete names every flag at fault at once.
func (o *options) complete() error {
	o.nats.complete()
	errs := []error{o.door.validate(), o.nats.validate()}
	seen := map[string]bool{}
	for _, text := range o.nodes {
		g, err := autoscaler.ParseGroup(text)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("--nodes: %w", err))
		case seen[g.Deployment.String()]:
			errs = append(errs, fmt.Errorf("--nodes: %s is there twice", g.Deployment))
		case !o.allNamespaces && g.Deployment.Namespace != o.namespace:
			errs = append(errs, fmt.Errorf("--nodes=%s: only namespace %s is served: use --namespace or --all-namespaces", text, o.namespace))
		}
		seen[g.Deployment.String()] = true
		o.groups = append(o.groups, g)
	}
	if o.listen == "" {
		o.listen = o.door.listen()
	}
	if _, _, err := net.SplitHostPort(o.listen); err != nil {
		errs = append(errs, fmt.Errorf("--listen: %w", err))
	}
	if net.ParseIP(o.address) == nil {
		errs = append(errs, fmt.Errorf("--address %q is no IP address", o.address))
	}
	if o.port < 1 || o.port > 65535 {
		errs = append(errs, fmt.Errorf("--port must be in 1..65535, not %d", o.port))
	}
	if o.namespace == "" {
		errs = append(errs, errors.New("--namespace is empty: name one, or use --all-namespaces"))
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
