package autoscaler

import (
	"cmp"
	"context"
	"crypto/x509"
	"fmt"
	"path"
	"runtime/debug"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
)

// An Observer measures and logs every call, and keeps a panic in one from ending the process.
type Observer struct{ took *prometheus.HistogramVec }

// NewObserver returns an Observer.
func NewObserver() *Observer {
	return &Observer{took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "mcm_autoscaler_call_duration_seconds",
		Help: "Duration of calls of the cluster-autoscaler, by method and the code they ended with.",
		// From an answer from memory to the cluster-autoscaler's own timeout.
		Buckets: []float64{.00005, .0002, .001, .005, .02, .1, .5, 1, 5},
	}, []string{"method", "code"})}
}

// Collectors returns the metrics for registration.
func (o *Observer) Collectors() []prometheus.Collector { return []prometheus.Collector{o.took} }

// Intercept is a grpc.UnaryServerInterceptor.
func (o *Observer) Intercept(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (reply any, err error) {
	method, started := path.Base(info.FullMethod), time.Now()
	log := klog.FromContext(ctx)
	defer func() {
		if r := recover(); r != nil {
			log.Error(fmt.Errorf("panic: %v", r), "call failed", "method", method, "stack", string(debug.Stack()))
			reply, err = nil, status.Error(codes.Internal, "a bug in the gateway: see the panic in its log")
		}
		took, code := time.Since(started), status.Code(err)
		o.took.WithLabelValues(method, code.String()).Observe(took.Seconds())
		log := log.V(levelOf(method, code))
		if !log.Enabled() { // a thousand nodes make thousands of calls in a loop
			return
		}
		details := []any{"method", method, "client", clientOf(ctx), "request", req, "code", code.String(), "took", took.String()}
		if err != nil {
			details = append(details, "err", err.Error())
		}
		log.Info("call", details...)
	}()

	return handle(ctx, req)
}

// levelOf returns the verbosity at which a call with this code is logged. A failed write is
// always logged, because it is the reason why a group does not scale.
func levelOf(method string, code codes.Code) int {
	const each, failed = 5, 2
	switch {
	case code == codes.OK, code == codes.Unimplemented:
		return each
	case writes[method]:
		return 0
	default:
		return failed
	}
}

var writes = map[string]bool{"NodeGroupIncreaseSize": true, "NodeGroupDeleteNodes": true, "NodeGroupDecreaseTargetSize": true}

// clientOf returns the caller's name from its certificate, or its address.
func clientOf(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return "unknown"
	}
	if info, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(info.State.PeerCertificates) > 0 {
		return nameOf(info.State.PeerCertificates[0])
	}

	return p.Addr.String()
}

// nameOf returns the first name in a certificate: newer ones have no common name.
func nameOf(c *x509.Certificate) string {
	names := slices.Concat([]string{c.Subject.CommonName}, c.DNSNames, c.EmailAddresses)
	for _, uri := range c.URIs {
		names = append(names, uri.String())
	}
	for _, ip := range c.IPAddresses {
		names = append(names, ip.String())
	}

	return cmp.Or(append(names, "serial "+c.SerialNumber.String())...)
}
