package autoscaler

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/dispatch"
)

// Reasons of Events on a MachineDeployment: about invalid annotations for sizes, for options,
// or for the node template, and about a missing node template.
const (
	EventInvalidNodeGroup    = "InvalidNodeGroup"
	EventInvalidOption       = "InvalidNodeGroupOption"
	EventInvalidNodeTemplate = "InvalidNodeTemplate"
	EventNoNodeTemplate      = "NoNodeTemplate"
)

// A snapshot is the data for all answers within one loop of the cluster-autoscaler, so that
// they agree. It is never changed.
type snapshot struct {
	taken  time.Time
	groups []*group // MachineDeployments, by id
	byID   map[string]*group
	// The machines of all groups, by the cluster-autoscaler's names for them.
	byPlaceholder, byProviderID, byNodeName map[string]*machine
	provided                                *providedSnapshot // groups of drivers
}

// A group is a node group.
type group struct {
	id         string
	min, max   int32
	options    dispatch.NodeGroupOptions
	deployment *v1alpha1.MachineDeployment // from a cache: read only
	marked     map[string]bool             // machines that the deployment names for deletion
	machines   []*machine
}

// A machine is one that belongs to a group.
type machine struct {
	*v1alpha1.Machine // from a cache: read only

	group string
	node  *corev1.Node // nil if it has not joined
}

// upcomingPrefix begins the names of nodes that the cluster-autoscaler invents for upcoming
// machines. Some of them are copies of existing Nodes, with their ids.
const upcomingPrefix = "template-node-for-"

// placeholderPrefix begins the id of an instance that has not joined. The cluster-autoscaler
// needs an id before there is a provider id.
const placeholderPrefix = "requested://"

func (m *machine) placeholder() string { return placeholderPrefix + m.Namespace + "/" + m.Name }

// instanceID returns exactly the Node's provider id: otherwise the cluster-autoscaler believes
// that the instance never joins.
func (m *machine) instanceID() string {
	if m.node != nil && m.node.Spec.ProviderID != "" {
		return m.node.Spec.ProviderID
	}

	return m.placeholder()
}

// isImpostor reports whether a node has the machine's provider id but is not the machine's
// node: kubelets choose their provider id. The deletion of such a node, perhaps idle, would
// delete the machine, perhaps in use. The cluster-autoscaler's invented nodes have the id in
// both fields or are copies.
func (m *machine) isImpostor(providerID, name string) bool {
	return m.node != nil && name != m.node.Name && name != "" && name != providerID && !strings.HasPrefix(name, upcomingPrefix)
}

// going reports whether the machine is or will be deleted.
func (g *group) going(m *v1alpha1.Machine) bool {
	return !m.DeletionTimestamp.IsZero() || m.Status.CurrentStatus.Phase == v1alpha1.MachineTerminating ||
		g.marked[m.Name] || m.Annotations[v1alpha1.AnnotationKeyMarkedForDeletionTime] != ""
}

// take takes and stores a snapshot. It reads caches only.
func (s *Server) take(ctx context.Context) (*snapshot, error) {
	s.taking.Lock() // otherwise the older one of two might be stored last
	defer s.taking.Unlock()

	return s.takeLocked(ctx)
}

// takeLocked is take; the caller holds s.taking.
func (s *Server) takeLocked(ctx context.Context) (*snapshot, error) {
	taken := s.cfg.Now()
	var deployments v1alpha1.MachineDeploymentList
	var sets v1alpha1.MachineSetList
	var machines v1alpha1.MachineList
	var nodes corev1.NodeList
	for _, read := range []struct {
		client.Reader

		into client.ObjectList
	}{
		// Owned objects before their owners, which then exist, and machines before their Nodes.
		{s.cfg.Control, &machines},
		{s.cfg.Control, &sets},
		{s.cfg.Control, &deployments},
		{s.cfg.Nodes, &nodes},
	} {
		if err := read.List(ctx, read.into, client.UnsafeDisableDeepCopy); err != nil {
			return nil, status.Errorf(codes.Unavailable, "read %T from the cache: %v", read.into, err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := &snapshot{
		taken: taken, provided: s.cfg.Provided.snapshot(),
		byID: map[string]*group{}, byPlaceholder: map[string]*machine{}, byProviderID: map[string]*machine{}, byNodeName: map[string]*machine{},
	}
	byUID := map[types.UID]*group{} // of deployments, and of their sets
	stored := map[client.ObjectKey]bool{}
	for i := range deployments.Items {
		d := s.newestLocked(&deployments.Items[i])
		stored[client.ObjectKeyFromObject(d)] = true
		if g := s.groupOfLocked(ctx, d); g != nil {
			now.groups, now.byID[g.id], byUID[d.UID] = append(now.groups, g), g, g
		}
	}
	for _, g := range s.cfg.Groups {
		if !stored[g.Deployment] && !s.missing[g.Deployment] {
			klog.FromContext(ctx).Info("the MachineDeployment of a configured node group does not exist", "machineDeployment", g.Deployment)
		}
		s.missing[g.Deployment] = !stored[g.Deployment]
	}
	maps.DeleteFunc(s.written, func(key client.ObjectKey, _ *v1alpha1.MachineDeployment) bool { return !stored[key] })
	maps.DeleteFunc(s.reported, func(key client.ObjectKey, _ map[string]string) bool { return !stored[key] })
	for i := range sets.Items {
		if owner := metav1.GetControllerOfNoCopy(&sets.Items[i]); owner != nil && byUID[owner.UID] != nil {
			byUID[sets.Items[i].UID] = byUID[owner.UID]
		}
	}
	index := indexNodes(nodes.Items)
	for i := range machines.Items {
		m := &machines.Items[i]
		if owner := metav1.GetControllerOfNoCopy(m); owner != nil && byUID[owner.UID] != nil {
			now.add(byUID[owner.UID], m, index.of(m))
		}
	}
	slices.SortFunc(now.groups, func(a, b *group) int { return strings.Compare(a.id, b.id) })
	s.last.Store(now)

	return now, nil
}

func (sn *snapshot) add(g *group, m *v1alpha1.Machine, node *corev1.Node) {
	one := &machine{Machine: m, group: g.id, node: node}
	g.machines = append(g.machines, one)
	sn.byPlaceholder[one.placeholder()] = one
	if m.Spec.ProviderID != "" {
		sn.byProviderID[m.Spec.ProviderID] = one
	}
	if node == nil {
		return
	}
	sn.byNodeName[node.Name] = one
	if node.Spec.ProviderID != "" {
		sn.byProviderID[node.Spec.ProviderID] = one
	}
}

// newestLocked returns our own last write of a deployment as long as the cache has not seen
// it. The caller holds s.mu.
func (s *Server) newestLocked(cached *v1alpha1.MachineDeployment) *v1alpha1.MachineDeployment {
	key := client.ObjectKeyFromObject(cached)
	ours, ok := s.written[key]
	if !ok {
		return cached
	}
	order, err := resourceversion.CompareResourceVersion(ours.ResourceVersion, cached.ResourceVersion)
	if err != nil || order <= 0 || ours.UID != cached.UID {
		delete(s.written, key)

		return cached
	}

	return ours
}

// showStored puts a deployment that was just written, or read from the API server, into the
// snapshot: the cluster-autoscaler reads its own writes within a loop.
func (s *Server) showStored(ctx context.Context, d *v1alpha1.MachineDeployment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.written[client.ObjectKeyFromObject(d)] = d
	before := s.last.Load()
	if before == nil {
		return
	}
	now := *before
	now.byID = maps.Clone(before.byID)
	now.groups = slices.Clone(before.groups)
	id := groupID(client.ObjectKeyFromObject(d))
	i := slices.IndexFunc(now.groups, func(g *group) bool { return g.id == id })
	if i < 0 {
		return
	}
	g := s.groupOfLocked(ctx, d)
	if g == nil {
		return // it is no group any more, from the next snapshot on
	}
	g.machines = now.groups[i].machines
	now.groups[i], now.byID[id] = g, g
	s.last.Store(&now)
}

func groupID(key client.ObjectKey) string { return key.Namespace + "/" + key.Name }

// groupOfLocked returns a deployment as a group; nil if it is none. The caller holds s.mu.
func (s *Server) groupOfLocked(ctx context.Context, d *v1alpha1.MachineDeployment) *group {
	if !d.DeletionTimestamp.IsZero() {
		return nil
	}
	lower, upper, ok, err := s.sizes(d)
	s.reportLocked(ctx, d, EventInvalidNodeGroup, "The cluster-autoscaler cannot use this node group: %v", err)
	if !ok {
		return nil
	}
	own, err := ownOptions(d.Annotations)
	s.reportLocked(ctx, d, EventInvalidOption, "The cluster-autoscaler's own settings apply instead: %v", err)
	_, err = templateNode(d, nil)
	s.reportLocked(ctx, d, EventInvalidNodeTemplate, "The cluster-autoscaler cannot add its first node: %v", err)
	g := &group{id: groupID(client.ObjectKeyFromObject(d)), min: lower, max: upper, options: own, deployment: d, marked: map[string]bool{}}
	for _, name := range markedMachines(d) {
		g.marked[name] = true
	}

	return g
}

// reportLocked logs a fault of a deployment as a node group and records an Event, once for
// each reason and error. A nil error means that the fault is corrected. The caller holds s.mu.
func (s *Server) reportLocked(ctx context.Context, d *v1alpha1.MachineDeployment, reason, format string, err error) {
	key := client.ObjectKeyFromObject(d)
	if err == nil {
		delete(s.reported[key], reason)

		return
	}
	if s.reported[key][reason] == err.Error() {
		return
	}
	if s.reported[key] == nil {
		s.reported[key] = map[string]string{}
	}
	s.reported[key][reason] = err.Error()
	klog.FromContext(ctx).Info("a MachineDeployment has invalid annotations as a node group, or no node template",
		"machineDeployment", key, "reason", reason, "err", err.Error())
	s.cfg.Events.Eventf(d, corev1.EventTypeWarning, reason, format, err)
}

// A nodeIndex finds Nodes.
type nodeIndex struct{ byName, byProviderID map[string]*corev1.Node }

func indexNodes(nodes []corev1.Node) nodeIndex {
	index := nodeIndex{map[string]*corev1.Node{}, map[string]*corev1.Node{}}
	for i := range nodes {
		index.byName[nodes[i].Name] = &nodes[i]
		if id := nodes[i].Spec.ProviderID; id != "" {
			index.byProviderID[id] = &nodes[i]
		}
	}

	return index
}

// of returns the Node of a machine; nil if it has not joined.
func (i nodeIndex) of(m *v1alpha1.Machine) *corev1.Node {
	if node := i.byName[m.Labels[v1alpha1.LabelKeyNode]]; node != nil && mayBeOf(m, node) {
		return node
	}

	return i.byProviderID[m.Spec.ProviderID]
}

// mayBeOf reports whether a Node with the machine's node name is the machine's, and not that
// of an earlier instance.
func mayBeOf(m *v1alpha1.Machine, node *corev1.Node) bool {
	return node.Spec.ProviderID == "" || m.Spec.ProviderID == "" || v1alpha1.SameInstance(node.Spec.ProviderID, m.Spec.ProviderID)
}

// find returns the machine of a node in a request; nil if it belongs to no group. A machine
// that has not joined is found by its placeholder.
func (sn *snapshot) find(providerID, name string) *machine {
	if m := sn.byPlaceholder[providerID]; m != nil {
		return m
	}
	if m := sn.byProviderID[providerID]; m != nil {
		if m.isImpostor(providerID, name) {
			return nil
		}

		return m
	}
	if m := sn.byPlaceholder[name]; m != nil {
		return m
	}
	m := sn.byNodeName[name]
	if m == nil || providerID != "" && m.node.Spec.ProviderID != "" {
		return nil // a later Node of that name
	}

	return m
}
