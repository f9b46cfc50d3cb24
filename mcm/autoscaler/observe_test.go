package autoscaler_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net/url"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// observe has a call end so, and returns what is logged at a verbosity.
func observe(ctx context.Context, verbosity int, method string, handle grpc.UnaryHandler) (log string, err error) {
	var b strings.Builder
	ctx = klog.NewContext(ctx, funcr.New(func(_, args string) { b.WriteString(args) }, funcr.Options{Verbosity: verbosity}))
	info := &grpc.UnaryServerInfo{FullMethod: "/x.CloudProvider/" + method}
	_, err = autoscaler.NewObserver().Intercept(ctx, &externalgrpc.NodeGroupIncreaseSizeRequest{Id: "the-group"}, info, handle)

	return b.String(), err
}

func ending(code codes.Code) grpc.UnaryHandler {
	return func(context.Context, any) (any, error) { return nil, status.Error(code, "the reason") }
}

func TestObserver_Log(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason    string
		verbosity int
		method    string
		code      codes.Code
		want      bool
	}{
		"each call":        {"-v=5 logs all", 5, "NodeGroupForNode", codes.OK, true},
		"calls":            {"there are thousands in a loop", 4, "NodeGroupForNode", codes.OK, false},
		"no options":       {"is no failure", 4, "NodeGroupGetOptions", codes.Unimplemented, false},
		"failed read":      {"-v=2 logs it", 2, "NodeGroupTargetSize", codes.NotFound, true},
		"failed read, -v0": {"the autoscaler says so itself", 0, "NodeGroupTargetSize", codes.NotFound, false},
		"refused write":    {"it is why a group does not change", 0, "NodeGroupDeleteNodes", codes.FailedPrecondition, true},
		"refused growth":   {"it is why a group does not change", 0, "NodeGroupIncreaseSize", codes.OutOfRange, true},
		"write":            {"who wrote has logged it", 0, "NodeGroupIncreaseSize", codes.OK, false},
	} {
		log, err := observe(t.Context(), tc.verbosity, tc.method, ending(tc.code))
		if status.Code(err) != tc.code {
			t.Errorf("%s: %v", name, err)
		}
		if got := strings.Contains(log, tc.method) && strings.Contains(log, "the-group"); got != tc.want {
			t.Errorf("%s: logged %q: %s", name, log, tc.reason)
		}
	}
}

func TestObserver_Client(t *testing.T) {
	t.Parallel()
	for want, c := range map[string]*x509.Certificate{
		"the-autoscaler":   {Subject: pkix.Name{CommonName: "the-autoscaler"}, DNSNames: []string{"other"}},
		"autoscaler.svc":   {DNSNames: []string{"autoscaler.svc"}},
		"spiffe://a/scale": {URIs: []*url.URL{{Scheme: "spiffe", Host: "a", Path: "/scale"}}},
		"serial 7":         {SerialNumber: big.NewInt(7)},
	} {
		if c.SerialNumber == nil {
			c.SerialNumber = big.NewInt(1)
		}
		ctx := peer.NewContext(t.Context(), &peer.Peer{AuthInfo: credentials.TLSInfo{State: tls.ConnectionState{PeerCertificates: []*x509.Certificate{c}}}})
		log, _ := observe(ctx, 5, "NodeGroups", ending(codes.OK))
		if !strings.Contains(log, `"client"="`+want+`"`) {
			t.Errorf("logged %q, want client %s", log, want)
		}
	}
}

// A bug ends one call, and neither the process nor its secrets.
func TestObserver_Panic(t *testing.T) {
	t.Parallel()
	log, err := observe(t.Context(), 0, "Refresh", func(context.Context, any) (any, error) {
		panic("what went wrong") //nolint:forbidigo // what is tested
	})
	if status.Code(err) != codes.Internal || strings.Contains(err.Error(), "what went wrong") {
		t.Errorf("%v, want an internal error without details", err)
	}
	if !strings.Contains(log, "what went wrong") || !strings.Contains(log, "observe_test.go") {
		t.Errorf("logged %q, want the panic with its stack", log)
	}
}
