package install

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// TestGatewayWithEmbeddedNATS runs mcm-autoscaler as the folder autoscaler-embedded-bus
// does, for node groups that a driver serves, beside mcm with its own NATS, in which
// the gateway has got its user.
func TestGatewayWithEmbeddedNATS(t *testing.T) {
	r := newRig(t, "kustomize/install")
	ca := newAuthority(t)
	passwords := map[string]string{"VIRTUAL_PASSWORD": driverHash, "OPERATOR_PASSWORD": driverHash, "AUTOSCALER_PASSWORD": driverHash}
	nats := r.startEmbeddedManager(ca, withGateway(t, embeddedConf(t, ca, passwords)))
	r.startDriverAt(nats, "--mock-node-groups=small=0:10,large=0:3")
	gateway, c := r.startGateway(nats)

	const group = "provider:virtual/small"
	r.eventually("the driver's groups are there", func(ctx context.Context) error {
		ids, err := groupsOf(ctx, c)
		if err == nil && !slices.Equal(ids, []string{"provider:virtual/large", group}) {
			err = fmt.Errorf("there are %v", ids)
		}

		return err
	})
	_, err := c.NodeGroupIncreaseSize(t.Context(), &externalgrpc.NodeGroupIncreaseSizeRequest{Id: group, Delta: 2})
	r.must(err)
	running := r.running(c, group, 2)
	_, err = c.NodeGroupDeleteNodes(t.Context(), &externalgrpc.NodeGroupDeleteNodesRequest{
		Id: group, Nodes: []*externalgrpc.ExternalGrpcNode{{Name: running[0], ProviderID: running[0]}},
	})
	r.must(err)
	if left := r.running(c, group, 1); left[0] != running[1] {
		t.Errorf("%v is left, want %s", left, running[1])
	}
	// The log names who requested it.
	log, err := os.ReadFile(gateway.Log)
	r.must(err)
	if n := len(regexp.MustCompile(`"node group scaled" .*client="cluster-autoscaler"`).FindAll(log, -1)); n != 2 {
		t.Errorf("the log has %d changes by the cluster-autoscaler, want 2:\n%s", n, log)
	}
	r.nothingWasRefused()
}

// startGateway starts mcm-autoscaler with the roles from deploy/, and connects to it
// as the cluster-autoscaler does.
func (r *rig) startGateway(nats *embeddedNATS) (*stack.Gateway, externalgrpc.CloudProviderClient) {
	r.Helper()
	g := *r
	g.objects = objects(r.T, "kustomize/autoscaler-embedded-bus")
	for _, o := range g.objects {
		if slices.Contains(accountKinds, o.GetKind()) {
			r.must(stack.Apply(r.Context(), shared.kube, o))
		}
	}
	ca := newAuthority(r.T)
	files := ca.issue(filepath.Join(r.TempDir(), "gateway"), "mcm-autoscaler")
	args := g.args("mcm-autoscaler", map[string]string{
		"--namespace=$(NAMESPACE)":                     "", // is the Site's
		"--tls-cert=/etc/tls/tls.crt":                  "--tls-cert=" + filepath.Join(files, "tls.crt"),
		"--tls-key=/etc/tls/tls.key":                   "--tls-key=" + filepath.Join(files, "tls.key"),
		"--client-ca=/etc/tls/ca.crt":                  "--client-ca=" + filepath.Join(files, "ca.crt"),
		"--nats-ca=/etc/machinebus/nats-client/ca.crt": "",
	})
	gateway, err := r.site.StartGateway(r.Context(), g.accountKubeconfig("mcm-autoscaler"), namespace, append(args, nats.login("autoscaler")...)...)
	r.must(err)

	client := ca.issue(filepath.Join(r.TempDir(), "cluster-autoscaler"), "cluster-autoscaler")
	pair, err := tls.LoadX509KeyPair(filepath.Join(client, "tls.crt"), filepath.Join(client, "tls.key"))
	r.must(err)
	pem, err := os.ReadFile(filepath.Join(client, "ca.crt"))
	r.must(err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	conn, err := grpc.NewClient(gateway.Listen, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
		RootCAs: roots, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13,
	})))
	r.must(err)
	r.Cleanup(func() { _ = conn.Close() })

	return gateway, externalgrpc.NewCloudProviderClient(conn)
}

func groupsOf(ctx context.Context, c externalgrpc.CloudProviderClient) (ids []string, err error) {
	if _, err := c.Refresh(ctx, &externalgrpc.RefreshRequest{}); err != nil {
		return nil, err
	}
	answer, err := c.NodeGroups(ctx, &externalgrpc.NodeGroupsRequest{})
	for _, g := range answer.GetNodeGroups() {
		ids = append(ids, g.GetId())
	}

	return ids, err
}

// running waits until a group has n instances, all of them running, and returns them.
func (r *rig) running(c externalgrpc.CloudProviderClient, group string, n int) (ids []string) {
	r.Helper()
	r.eventually(fmt.Sprintf("%d instances of %s run", n, group), func(ctx context.Context) error {
		if _, err := groupsOf(ctx, c); err != nil {
			return err
		}
		answer, err := c.NodeGroupNodes(ctx, &externalgrpc.NodeGroupNodesRequest{Id: group})
		if err != nil {
			return err
		}
		ids = nil
		for _, i := range answer.GetInstances() {
			if i.GetStatus().GetInstanceState() == externalgrpc.InstanceStatus_instanceRunning {
				ids = append(ids, i.GetId())
			}
		}
		if len(ids) != n || len(answer.GetInstances()) != n {
			return fmt.Errorf("there are %v", answer.GetInstances())
		}

		return nil
	})

	return ids
}
