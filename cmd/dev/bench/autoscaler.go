package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/cmd/dev/stack"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/proto/externalgrpc"
)

// The calls of a loop of the cluster-autoscaler in a steady state, counted with version
// 1.36.1.
const (
	managedNodes, foreignNodes, nodeGroups = 1000, 50, 10
	sizesPerGroup, optionsPerNode          = 3, 6
	ownersPerManaged, ownersPerForeign     = 1, 7 // it does not cache that a node has no owner
)

// defaults are the cluster-autoscaler's own settings, all of which it sends along.
var defaults = &externalgrpc.NodeGroupAutoscalingOptions{
	ScaleDownUtilizationThreshold: 0.5, ScaleDownGpuUtilizationThreshold: 0.5,
	ScaleDownUnneededDuration: durationpb.New(10 * time.Minute), ScaleDownUnreadyDuration: durationpb.New(20 * time.Minute),
	MaxNodeProvisionDuration: durationpb.New(15 * time.Minute),
}

// nodeLabels and nodeAnnotations are what a Node has in a plain cluster; the
// cluster-autoscaler sends them with each question about it.
func nodeLabels(name string) map[string]string {
	return map[string]string{
		corev1.LabelArchStable: "amd64", corev1.LabelOSStable: "linux", "beta.kubernetes.io/arch": "amd64", "beta.kubernetes.io/os": "linux",
		corev1.LabelHostname: name, corev1.LabelInstanceTypeStable: "small", "beta.kubernetes.io/instance-type": "small",
		corev1.LabelTopologyRegion: "moon", corev1.LabelTopologyZone: "moon-1", "failure-domain.beta.kubernetes.io/region": "moon",
		"failure-domain.beta.kubernetes.io/zone": "moon-1", "node.kubernetes.io/role": "node", "worker.example.org/pool": "workers",
	}
}

func nodeAnnotations(name string) map[string]string {
	return map[string]string{
		"csi.volume.kubernetes.io/nodeid":                        `{"disk.csi.example.org":"` + name + `"}`,
		"node.alpha.kubernetes.io/ttl":                           "0",
		"volumes.kubernetes.io/controller-managed-attach-detach": "true",
		"projectcni.example.org/IPv4Address":                     "10.250.0.17/19",
		"projectcni.example.org/IPv4IPIPTunnelAddr":              "100.64.3.1",
	}
}

// benchAutoscaler measures all calls of a loop, made one after the other as by the
// cluster-autoscaler, on one connection with mutual TLS. The peer is a server that
// returns the same answers from constants.
func benchAutoscaler(ctx context.Context, b *bench) (err error) {
	if missing := stack.Missing(b.bin, "devcluster", "mcm-autoscaler"); len(missing) > 0 {
		return fmt.Errorf("not built in %s: %v; run: make bench", b.bin, missing)
	}
	site, err := stack.NewSite(stack.SiteOptions{Bin: b.bin, Dir: b.dir})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.Close()) }()
	cluster, err := site.StartAPIServer(ctx) // no controller minds that these nodes have no kubelets
	if err != nil {
		return err
	}
	kube, err := stack.NewClient(cluster.Kubeconfig)
	if err != nil {
		return err
	}
	if _, err := stack.ApplyCRDs(ctx, kube, b.crds); err != nil {
		return err
	}
	nodes, err := createNodes(ctx, kube)
	if err != nil {
		return err
	}
	pki, err := writePKI(b.dir)
	if err != nil {
		return err
	}
	gateway, err := site.StartGateway(ctx, cluster.Kubeconfig, namespace, "--tls-cert", pki.cert, "--tls-key", pki.key, "--client-ca", pki.ca, "-v=0")
	if err != nil {
		return err
	}
	bare, err := startBareGateway(site, pki)
	if err != nil {
		return err
	}
	ours, err := dialLoop(pki, gateway.Listen)
	if err != nil {
		return err
	}
	defer ours.close()
	peer, err := dialLoop(pki, bare)
	if err != nil {
		return err
	}
	defer peer.close()
	return b.compareLoops(ctx, gateway, ours, peer, nodes)
}

// compareLoops makes a loop's calls to both in each round.
func (b *bench) compareLoops(
	ctx context.Context, gateway *stack.Gateway, ours, peer *autoscalerLoop, nodes []*externalgrpc.ExternalGrpcNode,
) error {
	if _, err := peer.Refresh(ctx, &externalgrpc.RefreshRequest{}, grpc.WaitForReady(true)); err != nil {
		return fmt.Errorf("the peer: %w", err)
	}
	var took, times []float64
	table := [][]string{{"round", "calls", "total", "each", "in the gateway, without gRPC", "CPU of the gateway", "gRPC with constants"}}
	for round := range b.rounds {
		before, err := gatewaySpent(ctx, gateway)
		if err != nil {
			return err
		}
		total, err := ours.time(ctx, nodes)
		if err != nil {
			return err
		}
		after, err := gatewaySpent(ctx, gateway)
		if err != nil {
			return err
		}
		bare, err := peer.time(ctx, nodes)
		if err != nil {
			return fmt.Errorf("the peer: %w", err)
		}
		took = append(took, total.Seconds())
		times = append(times, total.Seconds()/bare.Seconds())
		table = append(table, []string{
			strconv.Itoa(round + 1), strconv.Itoa(ours.calls), seconds(total), micros(total / time.Duration(ours.calls)),
			seconds(after.answering - before.answering), seconds(after.cpu - before.cpu), seconds(bare),
		})
	}
	b.table(table...)
	b.atMost("autoscaler-loop-seconds", median(took), 1)
	const asMuch = 1.25
	b.atMost("autoscaler-loop-times-bare-grpc", median(times), asMuch)
	return nil
}

// spent is the time that the gateway has used so far.
type spent struct{ answering, cpu time.Duration }

func gatewaySpent(ctx context.Context, gateway *stack.Gateway) (s spent, err error) {
	if s.answering, err = answering(ctx, gateway); err != nil {
		return s, err
	}
	s.cpu, err = cpuTime(gateway.PID())
	return s, err
}

// answering returns how long the gateway has worked on answers so far, without gRPC, by
// the gateway's own metric.
func answering(ctx context.Context, gateway *stack.Gateway) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+gateway.Address+"/metrics", http.NoBody)
	if err != nil {
		return 0, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(res.Body)
	if err != nil {
		return 0, fmt.Errorf("metrics of the gateway: %w", err)
	}
	var sum float64
	for _, m := range families["mcm_autoscaler_call_duration_seconds"].GetMetric() {
		sum += m.GetHistogram().GetSampleSum()
	}
	return time.Duration(sum * float64(time.Second)), nil
}

// An autoscalerLoop makes the calls of a loop and counts them.
type autoscalerLoop struct {
	externalgrpc.CloudProviderClient

	conn  *grpc.ClientConn
	calls int
}

// dialLoop connects as the cluster-autoscaler does: once, with a certificate.
func dialLoop(p *pki, address string) (*autoscalerLoop, error) {
	secured, err := p.client()
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(credentials.NewTLS(secured)))
	if err != nil {
		return nil, err
	}
	return &autoscalerLoop{CloudProviderClient: externalgrpc.NewCloudProviderClient(conn), conn: conn}, nil
}

func (l *autoscalerLoop) close() { _ = l.conn.Close() } // nothing is under way

// time makes the calls of one loop.
func (l *autoscalerLoop) time(ctx context.Context, nodes []*externalgrpc.ExternalGrpcNode) (time.Duration, error) {
	l.calls = 0
	start := time.Now()
	err := l.run(ctx, nodes)
	return time.Since(start), err
}

func (l *autoscalerLoop) run(ctx context.Context, nodes []*externalgrpc.ExternalGrpcNode) error {
	l.calls += 2
	if _, err := l.Refresh(ctx, &externalgrpc.RefreshRequest{}); err != nil {
		return err
	}
	groups, err := l.NodeGroups(ctx, &externalgrpc.NodeGroupsRequest{})
	if err != nil {
		return err
	}
	if n := len(groups.GetNodeGroups()); n != nodeGroups {
		return fmt.Errorf("the gateway has %d groups, want %d", n, nodeGroups)
	}
	for _, g := range groups.GetNodeGroups() {
		for range sizesPerGroup {
			l.calls++
			if _, err := l.NodeGroupTargetSize(ctx, &externalgrpc.NodeGroupTargetSizeRequest{Id: g.GetId()}); err != nil {
				return err
			}
		}
	}
	managed := 0
	for _, node := range nodes {
		ok, err := l.node(ctx, node)
		if err != nil {
			return err
		}
		if ok {
			managed++
		}
	}
	if managed != managedNodes {
		return fmt.Errorf("%d nodes are in a group, want %d", managed, managedNodes)
	}
	return nil
}

// node makes the calls about one node, and reports whether it is in a group.
func (l *autoscalerLoop) node(ctx context.Context, node *externalgrpc.ExternalGrpcNode) (managed bool, err error) {
	for asked := 0; asked < ownersPerManaged || !managed && asked < ownersPerForeign; asked++ {
		l.calls++
		answer, err := l.NodeGroupForNode(ctx, &externalgrpc.NodeGroupForNodeRequest{Node: node})
		if err != nil {
			return false, err
		}
		id := answer.GetNodeGroup().GetId()
		managed = id != ""
		for range optionsPerNode {
			if !managed {
				break
			}
			l.calls++
			_, err := l.NodeGroupGetOptions(ctx, &externalgrpc.NodeGroupAutoscalingOptionsRequest{Id: id, Defaults: defaults})
			if status.Code(err) != codes.Unimplemented {
				return false, fmt.Errorf("options of a group without any: %w", err)
			}
		}
	}
	return managed, nil
}

// createNodes creates the objects that exist once all machines have joined. The gateway
// needs no controllers for them.
func createNodes(ctx context.Context, kube client.Client) ([]*externalgrpc.ExternalGrpcNode, error) {
	var sets []*v1alpha1.MachineSet
	for i := range nodeGroups {
		d := &v1alpha1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: groupName(i),
			Annotations: map[string]string{"cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size": strconv.Itoa(managedNodes)},
		}}
		d.Spec.Replicas = managedNodes / nodeGroups
		d.Spec.Template.Spec.Class = v1alpha1.ClassSpec{Kind: v1alpha1.KindMachineClass, Name: className}
		if err := kube.Create(ctx, d); err != nil {
			return nil, err
		}
		set := &v1alpha1.MachineSet{ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: d.Name, OwnerReferences: []metav1.OwnerReference{owner(d, v1alpha1.KindMachineDeployment)},
		}}
		if err := kube.Create(ctx, set); err != nil {
			return nil, err
		}
		sets = append(sets, set)
	}
	nodes := make([]*externalgrpc.ExternalGrpcNode, managedNodes+foreignNodes)
	group, ctx := errgroup.WithContext(ctx)
	const parallel = 16
	group.SetLimit(parallel)
	for i := range nodes {
		name := nodeName(i)
		node := &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: nodeLabels(name), Annotations: nodeAnnotations(name)},
			Spec:       corev1.NodeSpec{ProviderID: "virtual:///here/" + name},
		}
		nodes[i] = &externalgrpc.ExternalGrpcNode{
			Name: name, ProviderID: node.Spec.ProviderID, Labels: node.Labels, Annotations: node.Annotations,
		}
		group.Go(func() error {
			if err := kube.Create(ctx, node); err != nil || i >= managedNodes {
				return err
			}
			m := &v1alpha1.Machine{ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: name, Labels: map[string]string{v1alpha1.LabelKeyNode: name},
				OwnerReferences: []metav1.OwnerReference{owner(sets[i%nodeGroups], v1alpha1.KindMachineSet)},
			}}
			m.Spec.ProviderID = node.Spec.ProviderID
			m.Spec.Class = v1alpha1.ClassSpec{Kind: v1alpha1.KindMachineClass, Name: className}
			return kube.Create(ctx, m)
		})
	}
	return nodes, group.Wait()
}

func owner(o client.Object, kind string) metav1.OwnerReference {
	return metav1.OwnerReference{
		APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: kind, Name: o.GetName(), UID: o.GetUID(), Controller: new(true),
	}
}
