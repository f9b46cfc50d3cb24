package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	transport "google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/autoscaler"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// A scaler plays the cluster-autoscaler of one env, over the gateway as shipped:
// with mutual TLS, and no more than its own roles.
type scaler struct {
	*env
	externalgrpc.CloudProviderClient

	gateway   *stack.Gateway
	authority *authority
}

// newScaler starts a gateway, on the bus too, and connects to it.
func (e *env) newScaler(nats string) *scaler {
	e.Helper()
	s := &scaler{env: e, authority: newAuthority(e.T)}
	dir := e.TempDir()
	cert, key := s.authority.issue("gateway")
	args := []string{"--nats-url", nats, "--cluster-name", e.name}
	for flag, content := range map[string][]byte{"tls-cert": cert, "tls-key": key, "client-ca": s.authority.pem()} {
		path := filepath.Join(dir, flag)
		e.must(os.WriteFile(path, content, 0o600))
		args = append(args, "--"+flag, path)
	}
	var err error
	s.gateway, err = e.site.StartGateway(e.ctx(), e.gatewayKubeconfig(), e.name, args...)
	e.must(err)
	s.CloudProviderClient = externalgrpc.NewCloudProviderClient(s.dial(s.authority.client(s.authority)))
	s.must(s.start(e.ctx()))
	return s
}

// start makes the calls that the cluster-autoscaler makes before its first Refresh.
func (s *scaler) start(ctx context.Context) error {
	groups, err := s.NodeGroups(ctx, &externalgrpc.NodeGroupsRequest{})
	if err != nil {
		return err
	}
	for _, g := range groups.GetNodeGroups() {
		if _, err := s.instances(ctx, g.GetId()); err != nil {
			return err
		}
	}
	nodes := &corev1.NodeList{}
	if err := s.kube.List(ctx, nodes); err != nil {
		return err
	}
	for i := range nodes.Items {
		answer, err := s.NodeGroupForNode(ctx, &externalgrpc.NodeGroupForNodeRequest{Node: message(&nodes.Items[i])})
		if err != nil {
			return err
		}
		if id := answer.GetNodeGroup().GetId(); id != "" { // once for each of its nodes
			if err := s.template(ctx, id); err != nil {
				return err
			}
		}
	}
	_, err = s.GPULabel(ctx, &externalgrpc.GPULabelRequest{})
	return err
}

// template asks for a group's template, without which a listed group is not scaled up.
func (s *scaler) template(ctx context.Context, group string) error {
	template, err := s.NodeGroupTemplateNodeInfo(ctx, &externalgrpc.NodeGroupTemplateNodeInfoRequest{Id: group})
	if err != nil || !sameNode(template) {
		return fmt.Errorf("template of %s: %v, %w", group, template, err)
	}
	return nil
}

// gatewayKubeconfig logs in as the ServiceAccount of deploy/kustomize/autoscaler,
// with the roles from there, in the env's namespace.
func (e *env) gatewayKubeconfig() string {
	e.Helper()
	for _, file := range []string{"service-account.yaml", "roles.yaml"} {
		objects, err := stack.LoadYAML("../../../deploy/kustomize/autoscaler/" + file)
		e.must(err)
		for _, o := range objects {
			if !strings.HasPrefix(o.GetKind(), "ClusterRole") {
				o.SetNamespace(e.name)
			}
			if o.GetKind() == "ClusterRoleBinding" {
				o.SetName(o.GetName() + "-" + e.name)
			}
			if subjects, ok := o.Object["subjects"].([]any); ok {
				for _, subject := range subjects {
					if subject, ok := subject.(map[string]any); ok {
						subject["namespace"] = e.name
					}
				}
			}
			e.must(stack.Apply(e.ctx(), e.kube, o))
		}
	}
	token := &authenticationv1.TokenRequest{}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: e.name, Name: "mcm-autoscaler"}}
	e.must(e.kube.SubResource("token").Create(e.ctx(), account, token))
	admin, err := clientcmd.LoadFromFile(e.cluster.Kubeconfig)
	e.must(err)
	admin.AuthInfos = map[string]*clientcmdapi.AuthInfo{"gateway": {Token: token.Status.Token}}
	for _, c := range admin.Contexts {
		c.AuthInfo = "gateway"
	}
	path := filepath.Join(e.TempDir(), "kubeconfig")
	e.must(clientcmd.WriteToFile(*admin, path))
	e.secret["gateway's token"] = token.Status.Token
	return path
}

func (s *scaler) dial(c transport.TransportCredentials) *grpc.ClientConn {
	s.Helper()
	conn, err := grpc.NewClient(s.gateway.Listen, grpc.WithTransportCredentials(c), grpc.WithUnaryInterceptor(inTime))
	s.must(err)
	s.env.Cleanup(func() { _ = conn.Close() })
	return conn
}

// inTime gives a call the time that the cluster-autoscaler gives it by default.
func inTime(
	ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return invoke(ctx, method, req, reply, conn, opts...)
}

// A look is what one loop of the cluster-autoscaler learns.
type look struct {
	groups map[string]*externalgrpc.NodeGroup
	target map[string]int32
	owner  map[string]string // group by the names of the nodes; "" for none
}

// loop makes the calls of one loop, in its order and as often: a failure of any
// would stop all scaling.
func (s *scaler) loop(ctx context.Context) (*look, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if _, err := s.Refresh(ctx, &externalgrpc.RefreshRequest{}); err != nil {
		return nil, err
	}
	groups, err := s.NodeGroups(ctx, &externalgrpc.NodeGroupsRequest{})
	if err != nil {
		return nil, err
	}
	l := &look{groups: map[string]*externalgrpc.NodeGroup{}, target: map[string]int32{}, owner: map[string]string{}}
	for _, g := range groups.GetNodeGroups() {
		l.groups[g.GetId()] = g
		for range 3 {
			target, err := s.NodeGroupTargetSize(ctx, &externalgrpc.NodeGroupTargetSizeRequest{Id: g.GetId()})
			if err != nil {
				return nil, err
			}
			l.target[g.GetId()] = target.GetTargetSize()
		}
		if err := s.template(ctx, g.GetId()); err != nil {
			return nil, err
		}
	}
	nodes := &corev1.NodeList{}
	if err := s.kube.List(ctx, nodes); err != nil {
		return nil, err
	}
	for i := range nodes.Items {
		if err := s.ask(ctx, l, message(&nodes.Items[i])); err != nil {
			return nil, err
		}
	}
	upcoming := &externalgrpc.ExternalGrpcNode{Name: "template-node-for-x-1-upcoming-0"}
	return l, s.ask(ctx, l, upcoming)
}

// sameNode reports whether the fields of both dialects hold the node: an autoscaler crashes
// if its field is empty.
func sameNode(r *externalgrpc.NodeGroupTemplateNodeInfoResponse) bool {
	node := &corev1.Node{}
	return len(r.GetNodeBytes()) > 0 && slices.Equal(r.GetNodeBytes(), r.GetNodeInfo()) && node.Unmarshal(r.GetNodeBytes()) == nil &&
		!node.Status.Allocatable.Cpu().IsZero()
}

// ask asks whose a node is, and then for its group's options.
func (s *scaler) ask(ctx context.Context, l *look, node *externalgrpc.ExternalGrpcNode) error {
	answer, err := s.NodeGroupForNode(ctx, &externalgrpc.NodeGroupForNodeRequest{Node: node})
	if err != nil {
		return err
	}
	id := answer.GetNodeGroup().GetId()
	l.owner[node.GetName()] = id
	if id == "" { // which it does not remember: it asks six times more
		for range 6 {
			again, err := s.NodeGroupForNode(ctx, &externalgrpc.NodeGroupForNodeRequest{Node: node})
			if err != nil {
				return err
			}
			if owner := again.GetNodeGroup().GetId(); owner != "" {
				return fmt.Errorf("node %s had no group, and has %q when asked again", node.GetName(), owner)
			}
		}
		return nil
	}
	if g := l.groups[id]; g == nil || g.GetMaxSize() != answer.GetNodeGroup().GetMaxSize() {
		return fmt.Errorf("node %s is of group %v, which the list has as %v", node.GetName(), answer.GetNodeGroup(), g)
	}
	for range 6 {
		if err := s.options(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// ownOption is what each group that mark makes has of its own.
const ownOption = 7 * time.Minute

// options asks for a group's options: those of a driver have none here, the others
// one, beside which the defaults must come back.
func (s *scaler) options(ctx context.Context, group string) error {
	const other = 15 * time.Minute
	answer, err := s.NodeGroupGetOptions(ctx, &externalgrpc.NodeGroupAutoscalingOptionsRequest{
		Id: group, Defaults: &externalgrpc.NodeGroupAutoscalingOptions{
			ScaleDownUtilizationThreshold: 0.5, ScaleDownUnneededDuration: durationpb.New(other), MaxNodeProvisionDuration: durationpb.New(other),
		},
	})
	o := answer.GetNodeGroupAutoscalingOptions()
	switch {
	case strings.HasPrefix(group, "provider:"):
		if status.Code(err) != codes.Unimplemented {
			return fmt.Errorf("options of group %s: %v, %w; want Unimplemented", group, o, err)
		}
	case err != nil || o.GetScaleDownUnneededDuration().AsDuration() != ownOption || o.GetScaleDownUtilizationThreshold() != 0.5 ||
		o.GetMaxNodeProvisionDuration().AsDuration() != other:
		return fmt.Errorf("options of group %s: %v, %w", group, o, err)
	}
	return nil
}

func message(n *corev1.Node) *externalgrpc.ExternalGrpcNode {
	return &externalgrpc.ExternalGrpcNode{Name: n.Name, ProviderID: n.Spec.ProviderID, Labels: n.Labels, Annotations: n.Annotations}
}

// fake stands for an instance without a Node.
func fake(id, reason string) *externalgrpc.ExternalGrpcNode {
	return &externalgrpc.ExternalGrpcNode{
		Name: id, ProviderID: id, Annotations: map[string]string{"k8s.io/cluster-autoscaler/fake-node-reason": reason},
	}
}

// eventuallyLook loops until check is content.
func (s *scaler) eventuallyLook(what string, check func(*look) error) *look {
	s.Helper()
	var last *look
	s.eventually(what, func(ctx context.Context) error {
		l, err := s.loop(ctx)
		if err != nil {
			return err
		}
		last = l
		return check(l)
	})
	return last
}

// joined waits until a group has n nodes, and returns them.
func (s *scaler) joined(group string, n int) []*externalgrpc.ExternalGrpcNode {
	s.Helper()
	var list []*externalgrpc.ExternalGrpcNode
	s.eventually(fmt.Sprintf("group %s has %d nodes that all registered", group, n), func(ctx context.Context) error {
		l, err := s.loop(ctx)
		if err != nil {
			return err
		}
		instances, err := s.instances(ctx, group)
		if err != nil {
			return err
		}
		list = nil
		nodes := &corev1.NodeList{}
		if err := s.kube.List(ctx, nodes); err != nil {
			return err
		}
		for i := range nodes.Items {
			one := message(&nodes.Items[i])
			if l.owner[one.GetName()] == group && instances[one.GetProviderID()] != nil {
				list = append(list, one)
			}
		}
		if len(list) != n || len(instances) != n || int(l.target[group]) != n {
			return fmt.Errorf("%d nodes; %d instances: %v; target %d", len(list), len(instances), slices.Collect(maps.Keys(instances)), l.target[group])
		}
		return nil
	})
	return list
}

// instances are a group's, by id.
func (s *scaler) instances(ctx context.Context, group string) (map[string]*externalgrpc.InstanceStatus, error) {
	answer, err := s.NodeGroupNodes(ctx, &externalgrpc.NodeGroupNodesRequest{Id: group})
	out := map[string]*externalgrpc.InstanceStatus{}
	for _, i := range answer.GetInstances() {
		out[i.GetId()] = i.GetStatus()
	}
	return out, err
}

func (s *scaler) increase(group string, delta int32) error {
	_, err := s.NodeGroupIncreaseSize(s.ctx(), &externalgrpc.NodeGroupIncreaseSizeRequest{Id: group, Delta: delta})
	return err
}

func (s *scaler) decrease(group string, by int32) error {
	_, err := s.NodeGroupDecreaseTargetSize(s.ctx(), &externalgrpc.NodeGroupDecreaseTargetSizeRequest{Id: group, Delta: -by})
	return err
}

func (s *scaler) remove(group string, nodes ...*externalgrpc.ExternalGrpcNode) error {
	_, err := s.NodeGroupDeleteNodes(s.ctx(), &externalgrpc.NodeGroupDeleteNodesRequest{Id: group, Nodes: nodes})
	return err
}

// removeEach does as the cluster-autoscaler does: a call for each node, all at once.
func (s *scaler) removeEach(group string, nodes ...*externalgrpc.ExternalGrpcNode) {
	s.Helper()
	results := make(chan error)
	for _, n := range nodes {
		go func() { results <- s.remove(group, n) }()
	}
	var errs []error
	for range nodes {
		errs = append(errs, <-results)
	}
	s.must(errors.Join(errs...))
}

func (s *scaler) wantCode(what string, err error, code codes.Code) {
	s.Helper()
	if status.Code(err) != code {
		s.Errorf("%s: %v, want %v", what, err, code)
	}
}

// mark makes a pool a node group.
func (s *scaler) mark(p *pool, lower, upper string) string {
	s.Helper()
	d, err := p.get(s.ctx())
	s.must(err)
	before := d.DeepCopy()
	d.Annotations = map[string]string{
		autoscaler.AnnotationKeyMin: lower, autoscaler.AnnotationKeyMax: upper,
		"capacity.cluster-autoscaler.kubernetes.io/cpu": "4", "capacity.cluster-autoscaler.kubernetes.io/memory": "16Gi",
		"cluster.x-k8s.io/autoscaling-options-scaledownunneededtime": ownOption.String(),
	}
	s.must(s.kube.Patch(s.ctx(), d, client.MergeFrom(before)))
	id := s.name + "/" + p.name
	s.eventuallyLook("the pool is a group", func(l *look) error {
		if l.groups[id] == nil {
			return fmt.Errorf("groups are %v", l.groups)
		}
		return nil
	})
	return id
}

// machineOf returns the Machine behind a node.
func (s *scaler) machineOf(node *externalgrpc.ExternalGrpcNode) string {
	s.Helper()
	list := &v1alpha1.MachineList{}
	s.must(s.kube.List(s.ctx(), list, client.InNamespace(s.name)))
	for i := range list.Items {
		if list.Items[i].Labels[v1alpha1.LabelKeyNode] == node.GetName() {
			return list.Items[i].Name
		}
	}
	s.Fatalf("node %s has no machine", node.GetName())
	return ""
}

// An authority signs certificates for one test.
type authority struct {
	*testing.T

	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{T: t}
	a.cert, a.key = a.sign("authority", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	return a
}

func (a *authority) sign(name string, template *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.Fatal(err)
	}
	template.SerialNumber, template.Subject = big.NewInt(time.Now().UnixNano()), pkix.Name{CommonName: name}
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		a.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.Fatal(err)
	}
	return cert, key
}

func (a *authority) issue(name string) (certPEM, keyPEM []byte) {
	a.Helper()
	cert, key := a.sign(name, &x509.Certificate{
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	})
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		a.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
}

func (a *authority) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

// client returns credentials of this authority that trust a server of another.
func (a *authority) client(server *authority) transport.TransportCredentials {
	a.Helper()
	pair, err := tls.X509KeyPair(a.issue("cluster-autoscaler"))
	if err != nil {
		a.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(server.cert)
	return transport.NewTLS(&tls.Config{
		RootCAs: pool, ServerName: "127.0.0.1", MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair},
	})
}

// tokenFile has the cloud's API token, for a driver's flag.
func (e *env) tokenFile() string {
	e.Helper()
	path := filepath.Join(e.TempDir(), "token")
	e.must(os.WriteFile(path, []byte(e.cloud.APIToken+"\n"), 0o600))
	return path
}

// strangers are clients that must be refused.
func (s *scaler) strangers() map[string]transport.TransportCredentials {
	pool := x509.NewCertPool()
	pool.AddCert(s.authority.cert)
	return map[string]transport.TransportCredentials{
		"plaintext":             insecure.NewCredentials(),
		"no certificate":        transport.NewTLS(&tls.Config{RootCAs: pool, ServerName: "127.0.0.1", MinVersion: tls.VersionTLS13}),
		"another's certificate": newAuthority(s.T).client(s.authority),
	}
}
