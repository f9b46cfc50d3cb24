package autoscaler

import (
	"context"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"k8s.io/klog/v2"

	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// Annotations of a MachineDeployment with settings of its own: those of the
// Cluster API provider, and those of the machine controller manager's autoscaler,
// which win.
const (
	optionsPrefix    = "cluster.x-k8s.io/autoscaling-options-"
	optionsMCMPrefix = "autoscaler.gardener.cloud/"
)

// NodeGroupGetOptions returns the settings of a group that has some. Without, it is
// Unimplemented: any answer, also one that only repeats the defaults, sets to zero
// what the contract has no field for.
func (s *Server) NodeGroupGetOptions(
	ctx context.Context, req *externalgrpc.NodeGroupAutoscalingOptionsRequest,
) (*externalgrpc.NodeGroupAutoscalingOptionsResponse, error) {
	if isProvided(req.GetId()) {
		g, err := s.provided(ctx, req.GetId())
		if err != nil {
			return nil, err
		}

		return g.options(req.GetDefaults())
	}
	g, err := s.group(ctx, req.GetId())
	if err != nil {
		return nil, err
	}
	o := optionsOf(req.GetDefaults())
	found := false
	for name, set := range map[string]func(string) error{
		"utilization-threshold":     fraction(&o.utilization),
		"gpu-utilization-threshold": fraction(&o.gpuUtilization),
		"unneeded-time":             duration(&o.unneeded),
		"unready-time":              duration(&o.unready),
		"node-provision-time":       duration(&o.provision),
	} {
		text, ok := option(g, name)
		if !ok {
			continue
		}
		if err := set(text); err != nil {
			klog.FromContext(ctx).Info("option of a node group is ignored", "nodeGroup", g.id, "option", name, "err", err.Error())

			continue
		}
		found = true
	}
	if !found || req.GetDefaults() == nil {
		return nil, status.Errorf(codes.Unimplemented, "node group %s has no options of its own", g.id)
	}

	return &externalgrpc.NodeGroupAutoscalingOptionsResponse{NodeGroupAutoscalingOptions: o.message(req.GetDefaults())}, nil
}

// optionKeys are the annotations of an option, in falling rank.
var optionKeys = map[string][2]string{
	"utilization-threshold":     {optionsMCMPrefix + "scale-down-utilization-threshold", optionsPrefix + "scaledownutilizationthreshold"},
	"gpu-utilization-threshold": {optionsMCMPrefix + "scale-down-gpu-utilization-threshold", optionsPrefix + "scaledowngpuutilizationthreshold"},
	"unneeded-time":             {optionsMCMPrefix + "scale-down-unneeded-time", optionsPrefix + "scaledownunneededtime"},
	"unready-time":              {optionsMCMPrefix + "scale-down-unready-time", optionsPrefix + "scaledownunreadytime"},
	"node-provision-time":       {optionsMCMPrefix + "max-node-provision-time", optionsPrefix + "maxnodeprovisiontime"},
}

func option(g *group, name string) (string, bool) {
	for _, key := range optionKeys[name] {
		if text, ok := g.deployment.Annotations[key]; ok {
			return text, true
		}
	}

	return "", false
}

func fraction(to *float64) func(string) error {
	return func(text string) error {
		const bits = 64
		f, err := strconv.ParseFloat(text, bits)
		if err == nil {
			*to = f
		}

		return err
	}
}

func duration(to *time.Duration) func(string) error {
	return func(text string) error {
		d, err := time.ParseDuration(text)
		if err == nil {
			*to = d
		}

		return err
	}
}

// options are a group's settings apart from the wire's dialects.
type options struct {
	utilization, gpuUtilization  float64
	unneeded, unready, provision time.Duration
}

func optionsOf(m *externalgrpc.NodeGroupAutoscalingOptions) options {
	either := func(d *durationpb.Duration, old *externalgrpc.LegacyDuration) time.Duration {
		if d != nil {
			return d.AsDuration()
		}

		return time.Duration(old.GetDuration())
	}

	return options{
		utilization: m.GetScaleDownUtilizationThreshold(), gpuUtilization: m.GetScaleDownGpuUtilizationThreshold(),
		unneeded:  either(m.GetScaleDownUnneededDuration(), m.GetScaleDownUnneededTime()),
		unready:   either(m.GetScaleDownUnreadyDuration(), m.GetScaleDownUnreadyTime()),
		provision: either(m.GetMaxNodeProvisionDuration(), m.GetMaxNodeProvisionTime()),
	}
}

// message fills every field, in both dialects: an answer replaces all defaults.
func (o *options) message(defaults *externalgrpc.NodeGroupAutoscalingOptions) *externalgrpc.NodeGroupAutoscalingOptions {
	old := func(d time.Duration) *externalgrpc.LegacyDuration {
		return &externalgrpc.LegacyDuration{Duration: int64(d)}
	}

	return &externalgrpc.NodeGroupAutoscalingOptions{
		ScaleDownUtilizationThreshold: o.utilization, ScaleDownGpuUtilizationThreshold: o.gpuUtilization,
		ScaleDownUnneededTime: old(o.unneeded), ScaleDownUnneededDuration: durationpb.New(o.unneeded),
		ScaleDownUnreadyTime: old(o.unready), ScaleDownUnreadyDuration: durationpb.New(o.unready),
		MaxNodeProvisionTime: old(o.provision), MaxNodeProvisionDuration: durationpb.New(o.provision),
		ZeroOrMaxNodeScaling: defaults.GetZeroOrMaxNodeScaling(), IgnoreDaemonSetsUtilization: defaults.GetIgnoreDaemonSetsUtilization(),
	}
}
