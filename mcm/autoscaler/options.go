package autoscaler

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/mcm/dispatch"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// Annotations with a MachineDeployment's own settings: those of the Cluster API provider, and
// those of the machine controller manager's autoscaler, which take precedence.
const (
	optionsPrefix    = "cluster.x-k8s.io/autoscaling-options-"
	optionsMCMPrefix = "autoscaler.gardener.cloud/"
)

// NodeGroupGetOptions returns the settings of a group that has its own, and otherwise
// Unimplemented. Any answer, even the defaults, sets to zero what the contract has no field
// for. Before 1.29 that was the time that nodes have to join, so upcoming nodes would be
// deleted.
func (s *Server) NodeGroupGetOptions(
	ctx context.Context, req *externalgrpc.NodeGroupAutoscalingOptionsRequest,
) (*externalgrpc.NodeGroupAutoscalingOptionsResponse, error) {
	var own dispatch.NodeGroupOptions
	if isProvided(req.GetId()) {
		g, err := s.provided(ctx, req.GetId())
		if err != nil {
			return nil, err
		}
		own = g.Options
	} else {
		g, err := s.group(ctx, req.GetId())
		if err != nil {
			return nil, err
		}
		own = g.options
	}
	defaults := req.GetDefaults()
	if own == (dispatch.NodeGroupOptions{}) || defaults.GetMaxNodeProvisionTime() == nil && defaults.GetMaxNodeProvisionDuration() == nil {
		return nil, status.Errorf(codes.Unimplemented,
			"node group %s has no options of its own, or none that this cluster-autoscaler supports", req.GetId())
	}
	o := optionsOf(defaults)
	set(&o.utilization, own.Utilization)
	set(&o.gpuUtilization, own.GPUUtilization)
	set(&o.unneeded, own.Unneeded)
	set(&o.unready, own.Unready)
	set(&o.provision, own.Provision)

	return &externalgrpc.NodeGroupAutoscalingOptionsResponse{NodeGroupAutoscalingOptions: o.message(defaults)}, nil
}

func set[T any](to, from *T) {
	if from != nil {
		*to = *from
	}
}

// ownOptions reads a deployment's options. The error names those that are omitted because they
// are not valid.
func ownOptions(annotations map[string]string) (dispatch.NodeGroupOptions, error) {
	r := optionReader{annotations: annotations}
	o := dispatch.NodeGroupOptions{
		Utilization:    r.fraction("scale-down-utilization-threshold", "scaledownutilizationthreshold"),
		GPUUtilization: r.fraction("scale-down-gpu-utilization-threshold", "scaledowngpuutilizationthreshold"),
		Unneeded:       r.duration("scale-down-unneeded-time", "scaledownunneededtime", checkDelay),
		Unready:        r.duration("scale-down-unready-time", "scaledownunreadytime", checkDelay),
		Provision:      r.duration("max-node-provision-time", "maxnodeprovisiontime", checkLimit),
	}

	return o, joined(r.errs)
}

// soundOptions returns a driver's options without the invalid ones, which the error names.
func soundOptions(o dispatch.NodeGroupOptions) (dispatch.NodeGroupOptions, error) {
	var errs []error
	o = dispatch.NodeGroupOptions{
		Utilization:    sound(o.Utilization, "scale_down_utilization_threshold", checkFraction, &errs),
		GPUUtilization: sound(o.GPUUtilization, "scale_down_gpu_utilization_threshold", checkFraction, &errs),
		Unneeded:       sound(o.Unneeded, "scale_down_unneeded_time", checkDelay, &errs),
		Unready:        sound(o.Unready, "scale_down_unready_time", checkDelay, &errs),
		Provision:      sound(o.Provision, "max_node_provision_time", checkLimit, &errs),
	}

	return o, joined(errs)
}

func sound[T any](v *T, name string, check func(T) error, errs *[]error) *T {
	if v == nil {
		return nil
	}
	if err := check(*v); err != nil {
		*errs = append(*errs, fmt.Errorf("%s: %w", name, err))

		return nil
	}

	return v
}

// joined joins errors in one line; it returns nil for none.
func joined(errs []error) error {
	var texts []string
	for _, err := range errs {
		if err != nil {
			texts = append(texts, err.Error())
		}
	}
	if len(texts) == 0 {
		return nil
	}

	return errors.New(strings.Join(texts, "; "))
}

// An optionReader reads annotations, each by two keys of which the first takes precedence.
type optionReader struct {
	annotations map[string]string
	errs        []error
}

func (r *optionReader) text(key, other string) (winner, text string, ok bool) {
	for _, k := range []string{optionsMCMPrefix + key, optionsPrefix + other} {
		if text, ok := r.annotations[k]; ok {
			return k, text, true
		}
	}

	return "", "", false
}

func (r *optionReader) fraction(key, other string) *float64 {
	name, text, ok := r.text(key, other)
	if !ok {
		return nil
	}
	const bits = 64
	f, err := strconv.ParseFloat(text, bits)
	if err != nil {
		f = math.NaN()
	}

	return sound(&f, "annotation "+name, checkFraction, &r.errs)
}

func (r *optionReader) duration(key, other string, check func(time.Duration) error) *time.Duration {
	name, text, ok := r.text(key, other)
	if !ok {
		return nil
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		r.errs = append(r.errs, fmt.Errorf("annotation %s: %w", name, err))

		return nil
	}

	return sound(&d, "annotation "+name, check, &r.errs)
}

func checkFraction(f float64) error {
	if !(f >= 0 && f <= 1) { // NaN is neither
		return errors.New("want a number from 0 to 1")
	}

	return nil
}

// checkDelay checks the time before a node may be deleted; 0 is valid.
func checkDelay(d time.Duration) error {
	if d < 0 {
		return fmt.Errorf("want a duration of at least zero, not %s", d)
	}

	return nil
}

// checkLimit checks the maximum time for a node to join.
func checkLimit(d time.Duration) error {
	if d <= 0 {
		return fmt.Errorf("want a duration above zero, not %s", d)
	}

	return nil
}

// options are a group's settings, independent of the wire's dialects.
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

// message sets every field in both dialects, because an answer replaces all defaults.
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
